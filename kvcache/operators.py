"""Attention and experts as explicit operators in models that run as they are, without the wrapper of an export.

In: nothing. Out: the names to ask transformers for, valid inside a `with` block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcache.attention import ATTENTION_NAME, explicit_attention
from kvcache.moe_engine import explicit_experts


@dataclass(frozen=True)
class OperatorNames:
    """What transformers knows the operators under.

    Attributes:
        attention: for `attn_implementation`.
        experts: for `experts_implementation`.
    """

    attention: str
    experts: str

    @property
    def options(self) -> dict[str, str]:
        """Keywords of `from_config` and `from_pretrained`."""
        return {"attn_implementation": self.attention, "experts_implementation": self.experts}


@contextmanager
def explicit_operators() -> Iterator[OperatorNames]:
    """Register both with transformers for the length of the block, and yield their names."""
    with explicit_attention(), explicit_experts() as experts:
        yield OperatorNames(ATTENTION_NAME, experts)

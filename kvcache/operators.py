"""The code that an export captures, for models and parts of them that run as they are, without the wrapper of an export.

In: nothing, or a module. Out: names to ask transformers for, and transformers' own functions replaced, inside `with` blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from kvcache.attention.operator import ATTENTION_NAME, AttentionChoice, explicit_attention
from kvcache.experts.engine import explicit_experts
from kvcache.forms import StateForm
from kvcache.recurrent import LastRead


@dataclass(frozen=True)
class OperatorNames:
    """What transformers knows the operators under.

    Attributes:
        attention: for `attn_implementation`.
        experts: for `experts_implementation`.
        choice: says whether a model can run with that attention.
    """

    attention: str
    experts: str
    choice: AttentionChoice

    @property
    def options(self) -> dict[str, str]:
        """Keywords of `from_config` and `from_pretrained`."""
        return {"attn_implementation": self.attention, "experts_implementation": self.experts}


@contextmanager
def explicit_operators() -> Iterator[OperatorNames]:
    """Register explicit attention and experts with transformers inside a `with` block, and yield their names."""
    with explicit_attention() as choice, explicit_experts() as experts:
        yield OperatorNames(ATTENTION_NAME, experts, choice)


@dataclass(frozen=True)
class ExportedCode:
    """Makes a module run what an export captures of it; called with the module, it is a context manager.

    It can be pickled, and what it replaces depends on the module alone: a reproduction enters it for a single piece.

    Attributes:
        form: how the model takes its states.
        last_read: shared by the caches that the module is called with.
        masked: see `AttentionChoice`.
    """

    form: StateForm
    last_read: LastRead = field(default_factory=LastRead)
    masked: bool = False

    @contextmanager
    def __call__(self, module: nn.Module) -> Iterator[None]:
        """Put the explicit operators and recurrences in place for the length of the block."""
        with (
            explicit_attention(masked=self.masked),
            explicit_experts(),
            self.form.replacements(module, self.last_read),
        ):
            yield

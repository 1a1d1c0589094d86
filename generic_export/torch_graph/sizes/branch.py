"""A condition on sizes that a capture was built on, and the line that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from generic_export.torch_graph.sizes.proofs import computed

Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Branch:
    """A condition on sizes that the code of a model asked for.

    Attributes:
        condition: over PyTorch's symbols; it was true at the example.
        source: file and line that asked.
        is_certain: the graph has the same operator the other way, and means another one: a slice from the other end.
    """

    condition: sympy.Expr
    source: str
    is_certain: bool = False

    def holds(self, sizes: Sizes) -> bool:
        """Say whether the module goes the same way at other sizes; not where the condition divides by a size that is 0."""
        try:
            return bool(computed(self.condition)(sizes))
        except ZeroDivisionError:
            return False


__all__ = ["Branch", "Sizes"]

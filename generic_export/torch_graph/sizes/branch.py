"""A condition on sizes that a capture was built on, and the line that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch

from generic_export.torch_graph.sizes.proofs import computed

Sizes = Mapping[sympy.Symbol, int]

_NO_CODE_OF_THE_MODEL = (Path(torch.__file__).parent, Path(__file__).parents[2])


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


def source_of_guard(location: Any) -> str:
    """Return file and line of a guard that a model's own code asked for; "" for PyTorch's reasoning about layouts."""
    return source_in_model(getattr(location, "filename", "") or "", getattr(location, "lineno", 0) or 0)


def source_in_model(path: str, line: int) -> str:
    """Return a place in code as text; "" where that is not a model's."""
    if not path or any(folder in Path(path).parents for folder in _NO_CODE_OF_THE_MODEL):
        return ""
    return f"{path}:{line}"


__all__ = ["Branch", "Sizes", "source_in_model", "source_of_guard"]

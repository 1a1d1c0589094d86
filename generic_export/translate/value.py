"""What a translation is given and gives back: values with their shapes and element types, and the arguments of operations.

Known to all of this room, whose door is `builder.py`: it makes them, and translations import them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from generic_export.errors import GraphError
from generic_export.nnef.graph import Argument, ArrayLiteral, Block, DimLiteral, TupleLiteral
from generic_export.torch_graph.dims import Dim, Shape, dim_text, expand_dim, same_dim, symbols_of
from generic_export.torch_graph.sizes.proofs import without_needless_extrema

Scalar = float | int | bool


@dataclass(frozen=True)
class Value:
    """One NNEF value while the graph is being written.

    Attributes:
        number: identity inside its builder; -1 for a literal.
        shape: sizes, possibly symbolic.
        dtype: element type.
        constant: the number that every element equals, when it is known.
        literal: True when `constant` is written in place (`2.0`) and no operation makes it.
    """

    number: int
    shape: Shape
    dtype: torch.dtype
    constant: Scalar | None = None
    literal: bool = False

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class QuantisedTensor:
    """Integers and what they stand for: (integers - zero_point) * scale.

    Attributes:
        integers: int8 or uint8.
        scale, zero_point: numbers, or one per channel of `axis`.
        axis: None when all elements share a scale.
        bounds: smallest and largest integer.
    """

    integers: Value
    scale: float | Value
    zero_point: int | Value | None
    axis: int | None
    bounds: tuple[int, int]


@dataclass(frozen=True)
class Emission:
    """One operation as emitted: still with value numbers, named when the graph is finished."""

    operator: str
    inputs: tuple[Argument | Value | tuple[Value, ...], ...]
    attributes: tuple[tuple[str, Argument], ...]
    outputs: tuple[Value, ...]
    block: Block
    hint: str
    generic_type: str = ""
    label: str = ""


def values_in(arguments: Sequence[Any]) -> list[Value]:
    """Return the values among arguments, however deep, in order."""
    found: list[Value] = []
    for item in arguments:
        if isinstance(item, Value):
            found.append(item)
        elif isinstance(item, tuple):
            found.extend(values_in(item))
        elif isinstance(item, (ArrayLiteral, TupleLiteral)):
            found.extend(values_in(item.elements))
    return found


def ints(values: Sequence[int]) -> ArrayLiteral:
    """Return an array literal of plain integers (axes, strides)."""
    return ArrayLiteral(tuple(int(value) for value in values))


def shape_argument(shape: Sequence[Dim]) -> ArrayLiteral:
    """Return a shape as an array literal of dimension expressions, as they are: tract compares how sizes are written."""
    expanded = (expand_dim(dim) for dim in shape)
    return ArrayLiteral(tuple(dim if isinstance(dim, int) else DimLiteral(dim_text(dim)) for dim in expanded))


def broadcast_shape(left: Sequence[Dim], right: Sequence[Dim]) -> Shape:
    """Return the shape that PyTorch's (right-aligned) broadcasting gives.

    Raises:
        GraphError: two sizes differ and neither is 1.
    """
    rank = max(len(left), len(right))
    padded_left = (1,) * (rank - len(left)) + tuple(left)
    padded_right = (1,) * (rank - len(right)) + tuple(right)
    shape: list[Dim] = []
    for first, second in zip(padded_left, padded_right, strict=True):
        if same_dim(second, 1) or same_dim(first, second):
            shape.append(first)
        elif same_dim(first, 1):
            shape.append(second)
        elif _meets_from_one(first, second):
            shape.append(min(first, second, key=lambda size: len(str(size))))
        else:
            raise GraphError(
                f"sizes {dim_text(first)} and {dim_text(second)} do not broadcast.",
                _advice(first, second),
                symbols=(*symbols_of(first), *symbols_of(second)),
            )
    return tuple(shape)


def _advice(left: Dim, right: Dim) -> str:
    equal = "They are equal in the example, and not at every size."
    if all(sympy.sympify(each).is_Symbol for each in (left, right)):
        return f"{equal} Give both axes one symbol, or declare one static."
    return f"{equal} Take one from the other in the model, as in y[:, : x.shape[1]], or declare the axes static."


def _meets_from_one(left: Dim, right: Dim) -> bool:
    """Say whether sizes are equal wherever no symbol is 0; PyTorch, which has seen them meet, leaves nothing open."""
    sizes = [sympy.sympify(each) for each in (left, right)]
    least = dict.fromkeys(set().union(*(size.free_symbols for size in sizes)), 1)
    return bool(least) and same_dim(*(without_needless_extrema(size, least) for size in sizes))


__all__ = ["Emission", "QuantisedTensor", "Scalar", "Value", "broadcast_shape", "ints", "shape_argument", "values_in"]

"""Complex tensors: tract's wheel has no complex element type, so that each one is carried as pairs on a trailing axis of 2.

A complex `Value` keeps the shape and dtype that PyTorch shows; what the graph holds has one axis more and a float dtype.
Operations that only move elements are emitted on the pairs without knowing it (`on_pairs`); all others must ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral, TupleLiteral
from generic_export.translate.value import Value, values_in

COMPONENT_DTYPES = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_COMPLEX_DTYPES = {component: dtype for dtype, component in COMPONENT_DTYPES.items()}

Attributes = Mapping[str, Argument]


def as_pairs(value: Value) -> Value:
    """Return the pairs that carry a complex value: the same NNEF value, read as real with a trailing axis of 2."""
    return replace(value, shape=(*value.shape, 2), dtype=COMPONENT_DTYPES[value.dtype], constant=None)


def as_complex(pairs: Value) -> Value:
    """Return the complex value that pairs on the trailing axis carry."""
    return replace(pairs, shape=pairs.shape[:-1], dtype=_COMPLEX_DTYPES[pairs.dtype], constant=None)


def carried_fact(shape: Sequence[Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], torch.dtype]:
    """Return the shape and dtype in which a tensor is carried."""
    component = COMPONENT_DTYPES.get(dtype)
    return (tuple(shape), dtype) if component is None else ((*shape, 2), component)


def _unchanged(attributes: Attributes, rank: int) -> Attributes:
    return attributes


def _keep_pair_axis(attributes: Attributes, rank: int) -> Attributes:
    return attributes if "axis_start" in attributes else {**attributes, "axis_start": 0, "axis_count": rank}


def _lengthened(name: str, last: Argument) -> Callable[[Attributes, int], Attributes]:
    def amended(attributes: Attributes, rank: int) -> Attributes:
        sizes = attributes[name]
        assert isinstance(sizes, ArrayLiteral)
        return {**attributes, name: ArrayLiteral((*sizes.elements, last))}

    return amended


# Operations that treat both components alike -> what their attributes must say about the trailing axis.
_ON_PAIRS: dict[str, Callable[[Attributes, int], Attributes]] = {
    "reshape": _keep_pair_axis,
    "tract_core_broadcast": _lengthened("shape", 2),
    "tile": _lengthened("repeats", 1),
    "pad": _lengthened("padding", TupleLiteral((0, 0))),
} | dict.fromkeys(
    (
        "unsqueeze",
        "squeeze",
        "slice",
        "concat",
        "copy",
        "neg",
        "transpose",
        "tract_core_gather",
        "sum_reduce",
        "mean_reduce",
    ),
    _unchanged,
)


def on_pairs(operator: str, inputs: Sequence[Any], attributes: Attributes) -> tuple[tuple[Any, ...], Attributes]:
    """Return an operation's inputs and attributes for the pairs that carry its complex operands.

    Raises:
        TranslationError: the operation computes with its elements, and does not know complex numbers.
    """
    amend = _ON_PAIRS.get(operator)
    if amend is None:
        raise TranslationError(
            f"{operator} is not supported for complex numbers (tract has no complex dtype).",
            "Compute with torch.view_as_real, or with the real and imaginary parts.",
        )
    rank = next(value.rank for value in values_in(inputs) if value.dtype in COMPONENT_DTYPES)
    return tuple(_paired(item) for item in inputs), amend(attributes, rank)


def _paired(item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(_paired(element) for element in item)
    return as_pairs(item) if isinstance(item, Value) and item.dtype in COMPONENT_DTYPES else item


def holds_complex(inputs: Sequence[Any]) -> bool:
    """Say whether an operand is complex."""
    return any(value.dtype in COMPONENT_DTYPES for value in values_in(inputs))


__all__ = ["COMPONENT_DTYPES", "as_complex", "as_pairs", "carried_fact", "holds_complex", "on_pairs"]

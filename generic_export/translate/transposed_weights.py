"""Products with a transposed weight, `x @ weight.T`: the expression reads the weight as it is stored.

A transposition between a stored tensor and its product hides the weight from every pass that looks for products of stored tensors,
such as the one that stores weights in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from generic_export.translate.value import Emission, Value, values_in


def reading_stored_weights(
    maker_of: Callable[[Value], Emission | None],
    label_of: Callable[[Value], str | None],
    expression: str,
    values: Sequence[Value],
) -> tuple[str, list[Value]]:
    """Return an einsum's expression and operands with stored tensors instead of their transpositions.

    Args:
        maker_of: returns the emission that makes a value.
        label_of: returns the label of a stored tensor, None for any other value.
        expression: of the einsum.
        values: its operands.
    """
    terms, output = expression.split("->")
    read, letters = [], []
    for term, value in zip(terms.split(","), values, strict=True):
        source, order = _untransposed(maker_of, value)
        if label_of(source) is None:
            source, order = value, list(range(value.rank))
        read.append(source)
        letters.append("".join(term[order.index(axis)] for axis in range(source.rank)))
    return f"{','.join(letters)}->{output}", read


def _untransposed(maker_of: Callable[[Value], Emission | None], value: Value) -> tuple[Value, list[int]]:
    """Return what a value is a transposition of, and which of its axes each axis of the value is."""
    order = list(range(value.rank))
    while (maker := maker_of(value)) is not None and maker.operator == "transpose":
        attributes: dict[str, Any] = dict(maker.attributes)
        axes = attributes["axes"].elements
        order = [int(axes[axis]) for axis in order]
        (value,) = values_in(maker.inputs)
    return value, order


__all__ = ["reading_stored_weights"]

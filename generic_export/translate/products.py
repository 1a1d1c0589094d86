"""Products in the forms that tract computes well: with joined operands, of squares, with transposed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from generic_export.torch_graph.dims import same_dim
from generic_export.translate.repeated_axes import RepeatedAxes
from generic_export.translate.value import Emission, Value, values_in

MakerOf = Callable[[Value], Emission | None]


# Products over a concatenation one of whose operands is a repeated row: the row is picked again and again, not
# repeated. tract (core/src/ops/einsum/mod.rs) takes such a product apart, one for each operand of the concatenation.
# It then takes the repetition off that operand, forgets it when nothing else has the axis (see `repeated_axes`), and
# refuses the load: the class token that DPT puts beside every patch becomes [B,1,D] where [B,S,D] was. Rows that a
# gather picks stay where they are.
@dataclass(frozen=True)
class Rejoined:
    """An operand that is concatenated anew.

    Attributes:
        place: among the operands.
        axis: of the concatenation.
        parts: what is concatenated.
        picked: the axes of each part whose one row is picked again and again.
    """

    place: int
    axis: int
    parts: tuple[Value, ...]
    picked: tuple[tuple[int, ...], ...]


def rejoined_operands(
    repeated: RepeatedAxes, maker_of: MakerOf, expression: str, values: Sequence[Value]
) -> list[Rejoined]:
    """Return the operands of an einsum in parts of which tract would lose an axis.

    Args:
        repeated: which axes hold one row repeated.
        maker_of: what makes a value.
        expression: of the einsum.
        values: its operands.
    """
    terms, output = expression.split("->")
    found = []
    for place, (term, value) in enumerate(zip(terms.split(","), values, strict=True)):
        axis, parts = _joined(maker_of(value))
        if not parts or term[axis] in output:  # taken apart along an axis that is summed over
            continue
        lost = [repeated.lost_by_einsum(expression, [*values[:place], part, *values[place + 1 :]]) for part in parts]
        picked = tuple(
            tuple(axis for axis in (term.index(output[one]) for one in each) if repeated.surely(part, axis))
            for part, each in zip(parts, lost, strict=True)
        )
        if any(picked):
            found.append(Rejoined(place, axis, parts, picked))
    return found


def _joined(maker: Emission | None) -> tuple[int, tuple[Value, ...]]:
    """Return axis and parts of a concatenation; no parts of anything else."""
    if maker is None or maker.operator != "concat":
        return 0, ()
    attributes: dict[str, Any] = dict(maker.attributes)
    return int(attributes["axis"]), tuple(values_in(maker.inputs))


# Products whose two free sizes are one symbol, `[T,D] x [T,D] -> [T,T]`: a release that never ends loading them gets
# others.
# tract 0.21.14 orders the operands of a product by size, and swaps two equal symbolic ones for ever (by running:
# 0.21.13 and 0.21.15 do not). One row more on one side, cut off the result, tells them apart.
def equal_free_axis(expression: str, values: Sequence[Value]) -> str | None:
    """Return a letter that only the second operand of an einsum has, whose symbolic size is that of one of the first's own."""
    terms, output = expression.split("->")
    if len(values) != 2:
        return None
    left, right = (
        {letter: dim for letter, dim in zip(term, value.shape, strict=True) if letter in output}
        for term, value in zip(terms.split(","), values, strict=True)
    )
    for letter in right.keys() - left.keys():
        sizes = (dim for own, dim in left.items() if own not in right)
        if not isinstance(right[letter], int) and any(same_dim(right[letter], dim) for dim in sizes):
            return letter
    return None


# Products with a transposed weight, `x @ weight.T`: the expression reads the weight as it is stored.
# A transposition between a stored tensor and its product hides the weight from every pass that looks for products of
# stored tensors, such as the one that stores weights in blocks.
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


__all__ = ["Rejoined", "equal_free_axis", "reading_stored_weights", "rejoined_operands"]

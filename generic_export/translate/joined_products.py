"""Products over a concatenation one of whose operands is a repeated row: the row is picked again and again, not repeated.

tract (core/src/ops/einsum/mod.rs) takes such a product apart, one for each operand of the concatenation. It then takes the
repetition off that operand, forgets it when nothing else has the axis (see `repeated_axes`), and refuses the load: the class token
that DPT puts beside every patch becomes [B,1,D] where [B,S,D] was. Rows that a gather picks stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from generic_export.translate.repeated_axes import RepeatedAxes
from generic_export.translate.value import Emission, Value, values_in

MakerOf = Callable[[Value], Emission | None]


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


__all__ = ["Rejoined", "rejoined_operands"]

"""Which axes hold one row repeated: tract's einsum forgets the repetition, and its result must be repeated again.

tract (core/src/ops/einsum/mod.rs, declutter_broadcast) takes a `tract_core_broadcast` off any operand of an einsum. When no
other operand has that axis the result silently has size 1 there: object queries of shape [B,5,32] projected become [1,5,32];
with a plain number instead of B the load is refused. So the product is made of one copy, and then repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from generic_export.nnef.graph import ArrayLiteral
from generic_export.torch_graph.dims import same_dim
from generic_export.translate.value import Emission, Value, values_in

# Operations that move rows and change none: what was repeated before them is so after them.
_MOVES = frozenset({"tract_core_broadcast", "transpose", "squeeze", "unsqueeze", "tract_core_cast"})


class RepeatedAxes:
    """What is known of the values emitted so far. An axis named in vain costs a copy, never a wrong result."""

    def __init__(self) -> None:
        self._fed: set[int] = set()
        self._axes: dict[int, frozenset[int]] = {}
        self._copies: dict[int, frozenset[int]] = {}

    def record(self, emission: Emission) -> None:
        """Learn from one more operation."""
        sources = [value for value in values_in(emission.inputs) if not value.literal]
        fed = emission.operator == "tract_core_external" or any(value.number in self._fed for value in sources)
        for output in emission.outputs:
            if fed:
                self._fed.add(output.number)
            axes = frozenset(self._of_output(emission, sources, output))
            if axes:
                self._axes[output.number] = axes
            if emission.operator in _MOVES and sources:
                self._copies[output.number] = frozenset(self._sure(emission, sources[0], output, axes))

    def __contains__(self, item: tuple[Value, int]) -> bool:
        """Say whether an axis of a value may be a repetition: declared so, or symbolic without depending on an input."""
        value, axis = item
        if axis in self._axes.get(value.number, ()):
            return True
        return value.number not in self._fed and not isinstance(value.shape[axis], int)

    def surely(self, value: Value, axis: int) -> bool:
        """Say whether an axis of a value is certain to hold copies of one row."""
        return axis in self._copies.get(value.number, ())

    def lost_by_einsum(self, expression: str, values: Sequence[Value]) -> list[int]:
        """Return the axes of an einsum's result that only repeated axes of its operands give."""
        terms, output = expression.split("->")
        operands = list(zip(terms.split(","), values, strict=True))
        lost = []
        for position, letter in enumerate(output):
            holders = [(value, term.index(letter)) for term, value in operands if letter in term]
            wide = [(value, axis) for value, axis in holders if not same_dim(value.shape[axis], 1)]
            if wide and all(holder in self for holder in wide):
                lost.append(position)
        return lost

    def single_letters(self, expression: str, values: Sequence[Value], lost: Sequence[int]) -> set[str]:
        """Return the letters of lost axes along which every operand is certain to hold copies of one row."""
        terms, output = expression.split("->")
        unsure = {
            letter
            for term, value in zip(terms.split(","), values, strict=True)
            for axis, letter in enumerate(term)
            if not same_dim(value.shape[axis], 1) and not self.surely(value, axis)
        }
        return {output[position] for position in lost} - unsure

    def _sure(self, emission: Emission, source: Value, output: Value, axes: frozenset[int]) -> Iterator[int]:
        origins = _origins(emission, source, output)
        known = self._copies.get(source.number, frozenset())
        for axis in axes:
            origin = origins[axis]
            fresh = emission.operator == "tract_core_broadcast" and not same_dim(source.shape[axis], output.shape[axis])
            if fresh or origin in known:
                yield axis

    def _of_output(self, emission: Emission, sources: Sequence[Value], output: Value) -> Iterator[int]:
        if not sources or emission.operator == "tract_core_einsum":
            return
        origins = _origins(emission, sources[0], output)
        holders = [value for value in sources if value.rank == sources[0].rank]
        for axis, dim in enumerate(output.shape):
            origin = origins[axis] if axis < len(origins) else None
            if origin is None or same_dim(dim, 1):
                continue
            wide = [value for value in holders if same_dim(value.shape[origin], dim)]
            fresh = not wide and emission.operator == "tract_core_broadcast"
            if fresh or (wide and all((value, origin) in self for value in wide)):
                yield axis


def _origins(emission: Emission, source: Value, output: Value) -> list[int | None]:
    """Return, for each axis of the result, the axis of the operands that it is (None: a new one)."""
    listed = dict(emission.attributes).get("axes")
    axes = [int(axis) for axis in listed.elements] if isinstance(listed, ArrayLiteral) else []  # type: ignore[arg-type]
    if emission.operator == "transpose":
        return list(axes)
    if emission.operator == "squeeze":
        return [axis for axis in range(source.rank) if axis not in axes]
    if emission.operator == "unsqueeze":
        kept = iter(range(source.rank))
        return [None if axis in axes else next(kept) for axis in range(output.rank)]
    return list(range(output.rank)) if output.rank == source.rank else []

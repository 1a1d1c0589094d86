"""A batch some of whose rows are copies of each other: computed once, and copied after.

tract (core/src/ops/einsum/mod.rs) makes a product of a convolution with a kernel of 1, folds the reshape that joined pictures and
queries into it, takes the repetition off, and cannot put the result in its place: "Trying to substitute a B,8,16,56,56 by
B,1,16,56,56" (DETR's maps, one copy for each query). It is less work too.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from generic_export.torch_graph.dims import Dim, same_shape, simplify_dim
from generic_export.translate.builder import NnefBuilder
from generic_export.translate.value import Value, values_in


@dataclass(frozen=True)
class Copies:
    """A batch of copies.

    Attributes:
        one: the batch without them.
        lead: the axes that its first axis was made of, 1 where there were copies.
        repeated: the same with the copies.
        size: of the first axis with the copies.
    """

    one: Value
    lead: tuple[Dim, ...]
    repeated: tuple[Dim, ...]
    size: Dim

    def again(self, b: NnefBuilder, computed: Value) -> Value:
        """Return what was computed of `one` as often as there are copies."""
        rest = computed.shape[1:]
        apart = b.reshape(computed, [*self.lead, *rest])
        return b.reshape(b.broadcast(apart, [*self.repeated, *rest]), [self.size, *rest])


def copies_in_batch(b: NnefBuilder, value: Value) -> Copies | None:
    """Return what a value's first axis holds copies of; None unless it was made of an axis that is sure to be a repetition."""
    found = _repetition(b, value)
    if found is None:
        return None
    source, axes = found
    single = source
    for axis in axes:
        single = b.slice(single, axis, 0, 1)
    joined = source.rank - value.rank + 1
    lead, repeated = single.shape[:joined], source.shape[:joined]
    size = simplify_dim(sympy.Mul(*map(sympy.sympify, lead)))
    return Copies(b.reshape(single, [size, *value.shape[1:]]), tuple(lead), tuple(repeated), value.shape[0])


def picked_in_parts(b: NnefBuilder, value: Value) -> Value:
    """Return a concatenation whose parts with copies are gathered: tract takes a product over it apart, part by part."""
    maker = b.maker_of(value)
    if maker is None or maker.operator != "concat":
        return value
    parts = list(values_in(maker.inputs))
    repetitions = [_repetition(b, part) for part in parts]
    if not any(repetitions):
        return value
    gathered = [
        part if found is None else b.reshape(b.picked(*found), part.shape)
        for part, found in zip(parts, repetitions, strict=True)
    ]
    return b.concat(gathered, int(dict(maker.attributes)["axis"]))  # type: ignore[arg-type]


def _repetition(b: NnefBuilder, value: Value) -> tuple[Value, list[int]] | None:
    """Return what a value is a reshape of, and the axes with copies that went into its first one."""
    maker = b.maker_of(value)
    if maker is None or maker.operator != "reshape":
        return None
    (source,) = values_in(maker.inputs)
    joined = source.rank - value.rank + 1
    if joined < 2 or not same_shape(source.shape[joined:], value.shape[1:]):
        return None
    axes = [axis for axis in range(joined) if b.holds_copies(source, axis)]
    return (source, axes) if axes else None


__all__ = ["Copies", "copies_in_batch", "picked_in_parts"]

"""Padding and cropping: constant, reflected, replicated, circular; amounts may be negative or depend on sizes."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.ops.conv import surrounded
from generic_export.ops.indexing import gather, positions
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, as_written, expand_dim, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Scalar, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten

Amounts = list[tuple[Dim, Dim]]

# PyTorch's name of a mode -> tract's name of a border, which is 'replicated'
# (docs/contributing/engine-facts.md#operators-of-tract_nnef).
_BORDERS = {"reflect": "reflect", "replicate": "replicated"}


def _amounts(pad: Sequence[Dim], rank: int) -> Amounts:
    """Return (before, after) per axis; PyTorch lists the last axis first."""
    listed = [(pad[2 * index], pad[2 * index + 1]) for index in range(len(pad) // 2)]
    return [(0, 0)] * (rank - len(listed)) + listed[::-1]


def _is_negative(amount: Dim) -> bool:
    return amount < 0 if isinstance(amount, int) else bool(amount.is_negative)


def _cropped(b: NnefBuilder, value: Value, amounts: Amounts) -> tuple[Value, Amounts]:
    """Cut what negative amounts take away; return what is left to add."""
    rest: Amounts = []
    for axis, (before, after) in enumerate(amounts):
        begin = simplify_dim(-sympy.sympify(before)) if _is_negative(before) else 0
        end = sympy.sympify(value.shape[axis]) + (after if _is_negative(after) else 0)
        value = b.slice(value, axis, begin, simplify_dim(end))
        rest.append((0 if _is_negative(before) else before, 0 if _is_negative(after) else after))
    return value, rest


def _padded_shape(value: Value, amounts: Amounts) -> list[Dim]:
    return [
        simplify_dim(sympy.sympify(size) + sympy.sympify(before) + sympy.sympify(after))
        for size, (before, after) in zip(value.shape, amounts, strict=True)
    ]


def _is_plain(amounts: Amounts) -> bool:
    return all(isinstance(amount, int) for pair in amounts for amount in pair)


def _constant(b: NnefBuilder, value: Value, amounts: Amounts, fill: Scalar) -> Value:
    value, amounts = _cropped(b, value, amounts)
    if not any(amount != 0 for pair in amounts for amount in pair):
        return value
    # tract's `pad` takes numbers only, fills with an f32, and knows no bool (pad.rs: dispatch_numbers).
    exact = value.dtype.is_floating_point or abs(fill) < 2**24
    if _is_plain(amounts) and exact and value.dtype is not torch.bool and fill == fill:
        return surrounded(b, value, amounts, border="constant", value=float(fill))  # type: ignore[arg-type]
    for axis, (before, after) in enumerate(amounts):
        first, last = _filling(b, value, axis, before, after, fill)
        value = b.concat([part for part in (first, value, last) if part is not None], axis)
    return value


def _filling(
    b: NnefBuilder, value: Value, axis: int, before: Dim, after: Dim, fill: Scalar
) -> tuple[Value | None, Value | None]:
    """Return what stands before and after an axis, so that tract finds the length of the result as other tensors have it written.

    Of `(H+1)/2 - H/2`, H and 1, as "same" padding adds them, it makes no `2*((H+1)/2) + 1`; of `2*((H+1)/2) - H`, H and 1 it does.
    """

    def filled(amount: Dim) -> Value | None:
        shape = (*value.shape[:axis], amount, *value.shape[axis + 1 :])
        return None if amount == 0 else b.full(shape, fill, value.dtype)

    if isinstance(before, int) and isinstance(after, int):
        return filled(before), filled(after)
    added = expand_dim(as_written(sympy.sympify(value.shape[axis]) + before + after) - sympy.sympify(value.shape[axis]))
    if isinstance(last := as_written(after), int):
        return filled(expand_dim(added - last)), filled(last)
    if before == 0:
        return None, filled(added)
    # Cut out of one tensor at the same place, both have the same length taken away and added.
    both = filled(added)
    return (None, None) if both is None else (b.slice(both, axis, 0, before), b.slice(both, axis, before, added))


def _mirrored(b: NnefBuilder, value: Value, amounts: Amounts, border: str) -> Value:
    if not _is_plain(amounts):  # tract's pad takes numbers only
        for axis, (before, after) in enumerate(amounts):
            if before != 0 or after != 0:
                value = gather(b, value, _sources(b, value.shape[axis], before, after, border), axis)
        return value
    # PyTorch mirrors the whole source, then cuts: a cut may go beyond what the source itself has.
    added = [(max(int(before), 0), max(int(after), 0)) for before, after in amounts]  # type: ignore[arg-type]
    cuts: Amounts = [(min(int(before), 0), min(int(after), 0)) for before, after in amounts]  # type: ignore[arg-type]
    if any(amount for pair in added for amount in pair):
        value = surrounded(b, value, added, border=border)
    return _cropped(b, value, cuts)[0]


def _sources(b: NnefBuilder, size: Dim, before: Dim, after: Dim, border: str) -> Value:
    """Return the index in the source of each place of an axis that is mirrored or repeated at its ends (i64)."""
    last = b.scalar(simplify_dim(sympy.sympify(size) - 1), torch.int64)
    length = simplify_dim(sympy.sympify(size) + before + after)
    source = b.binary("sub", positions(b, length), b.scalar(before, torch.int64))
    if border == _BORDERS["reflect"]:
        return b.binary("sub", last, b.unary("abs", b.binary("sub", last, b.unary("abs", source))))
    return b.binary("min", b.binary("max", source, b.scalar(0, torch.int64)), last)


def _circular(b: NnefBuilder, value: Value, amounts: Amounts) -> Value:
    # As PyTorch does it: what negative amounts take away is cut first, and the rest is wrapped.
    value, amounts = _cropped(b, value, amounts)
    if any(same_dim(size, 0) for size in value.shape):
        # tract cannot patch a slice of an empty tensor: it refuses the load.
        return b.full(tuple(_padded_shape(value, amounts)), 0, value.dtype)
    for axis, (before, after) in enumerate(amounts):
        size = value.shape[axis]
        parts = [value]
        if before != 0:
            parts.insert(0, b.slice(value, axis, simplify_dim(sympy.sympify(size) - before), size))
        if after != 0:
            parts.append(b.slice(value, axis, 0, after))
        value = b.concat(parts, axis)
    return value


@variant(aten.constant_pad_nd.default, mode="constant")
@variant(aten._pad_circular.default, mode="circular", value=None)
@translates(aten.pad.default)
def pad(
    b: NnefBuilder, self: Value, pad: Sequence[Dim], *, mode: str = "constant", value: Scalar | None = None
) -> Value:
    """pad(Tensor self, SymInt[] pad, str mode="constant", float? value=None) -> Tensor"""
    amounts = _amounts(pad, self.rank)
    if mode == "constant":
        return _constant(b, self, amounts, 0 if value is None else value)
    if mode == "circular":
        return _circular(b, self, amounts)
    return _mirrored(b, self, amounts, _BORDERS[mode])


@variant(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default, mode="reflect")
@variant(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default, mode="replicate"
)
def mirroring_pad(b: NnefBuilder, self: Value, padding: Sequence[Dim], *, mode: str) -> Value:
    """reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    return _mirrored(b, self, _amounts(padding, self.rank), _BORDERS[mode])

"""Operators that read a tensor in another order: flip, roll, sliding windows, strides."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.ops.cumulative import running_sum
from generic_export.ops.indexing import gather, positions
from generic_export.ops.scatter import put_rows
from generic_export.ops.shape import axis_of, volume
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten


@translates(aten.flip.default)
def flip(b: NnefBuilder, self: Value, dims: Sequence[int]) -> Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    value = self
    for axis in sorted({axis_of(axis, self.rank) for axis in dims}) if self.rank else ():
        size = value.shape[axis]
        if not same_dim(size, 1) and not same_dim(size, 0):
            last = b.scalar(simplify_dim(sympy.sympify(size) - 1), torch.int64)
            value = gather(b, value, b.binary("sub", last, positions(b, size)), axis)
    return value


@translates(aten.roll.default)
def roll(b: NnefBuilder, self: Value, shifts: Sequence[Dim], dims: Sequence[int] = ()) -> Value:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    if not dims:
        flat = b.reshape(self, [volume(self.shape)])
        return b.reshape(_rolled(b, flat, shifts[0], 0), self.shape)
    value = self
    for shift, axis in zip(shifts, dims, strict=True):
        value = _rolled(b, value, shift, axis_of(axis, self.rank))
    return value


def _rolled(b: NnefBuilder, value: Value, shift: Dim, axis: int) -> Value:
    size = value.shape[axis]
    if not isinstance(shift, int):
        raise TranslationError(f"roll by the dynamic amount {dim_text(shift)} has no NNEF form.")
    if isinstance(size, int):
        cut = -shift % size if size else 0
        parts = [b.slice(value, axis, cut, size), b.slice(value, axis, 0, cut)]
        return b.concat(parts, axis) if cut else value
    # The shift may exceed a dynamic size: the remainder is taken at run (positions are never negative here).
    length = b.scalar(size, torch.int64)
    ahead = simplify_dim(abs(shift) * sympy.sympify(size) - shift)
    place = b.binary("add", positions(b, size), b.scalar(ahead, torch.int64))
    rounds = b.binary("mul", b.binary("div", place, length), length)
    return gather(b, value, b.binary("sub", place, rounds), axis)


@translates(aten.unfold.default)
def unfold(b: NnefBuilder, self: Value, dimension: int, size: int, step: int) -> Value:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)"""
    if self.rank == 0:
        return b.slice(b.unsqueeze(self, [0]), 0, 0, size)
    axis = axis_of(dimension, self.rank)
    span = simplify_dim(sympy.sympify(self.shape[axis]) - size)
    count = simplify_dim(sympy.sympify(floor_div(span, step)) + 1)
    starts = b.binary("mul", positions(b, count, 0, 2), b.scalar(step, torch.int64))
    windows = gather(b, self, b.binary("add", starts, positions(b, size, 1, 2)), axis)
    kept = [other for other in range(windows.rank) if other != axis + 1]
    return b.transpose(windows, [*kept, axis + 1])


# --- strides -------------------------------------------------------------------------------------


def _require_stored(b: NnefBuilder, value: Value) -> None:
    """Refuse a tensor that is neither an input nor a parameter, the memory of which no graph knows.

    Raises:
        TranslationError: it is computed.
    """
    makers = [emission.operator for emission in b.emissions if value in emission.outputs]
    if makers not in (["tract_core_external"], ["variable"]):
        raise TranslationError(
            "as_strided of a computed tensor whose memory layout differs from its indices is not supported.",
            "Call contiguous() first, or use unfold, slices or index_select.",
        )


def _strided_places(b: NnefBuilder, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None) -> Value:
    """Return where the elements of a strided view lie in the memory of a contiguous tensor."""
    rank = len(size)
    place = b.full((1,) * rank, storage_offset or 0, torch.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        along = b.binary("mul", positions(b, count, axis, rank), b.scalar(step, torch.int64))
        place = b.binary("add", place, along)
    return place


@translates(aten.as_strided.default)
def as_strided(
    b: NnefBuilder, self: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"""
    _require_stored(b, self)
    return strided_copy(b, self, size, stride, storage_offset)


@translates(aten.as_strided_copy.default)
def strided_copy(
    b: NnefBuilder, self: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value:
    """as_strided_copy(Tensor self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""
    # `decompose/strided.py` leaves this operator where the tensor is contiguous alone.
    place = _strided_places(b, size, stride, storage_offset)
    return gather(b, b.reshape(self, [volume(self.shape)]), place, 0)


@translates(aten.resize.default)
def resize(b: NnefBuilder, self: Value, size: Sequence[Dim]) -> Value:
    """resize(Tensor self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor"""
    wanted, present = volume(size), volume(self.shape)
    if not (isinstance(wanted, int) and isinstance(present, int) and wanted <= present):
        raise TranslationError("resize to more elements than exist: the new ones have no value.")
    strides = [volume(size[axis + 1 :]) for axis in range(len(size))]
    return as_strided(b, self, size, strides)


@translates(aten.as_strided_scatter.default)
def as_strided_scatter(
    b: NnefBuilder,
    self: Value,
    src: Value,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    storage_offset: Dim | None = None,
) -> Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""
    _require_stored(b, self)
    place = _strided_places(b, size, stride, storage_offset)
    flat = b.reshape(self, [volume(self.shape)])
    return b.reshape(put_rows(b, flat, [place], b.cast(src, self.dtype)), self.shape)


@translates(aten.repeat_interleave.Tensor)
def repeat_interleave(b: NnefBuilder, repeats: Value, *, output_size: Dim | None = None) -> Value:
    """repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor"""
    if output_size is None:
        raise TranslationError(
            "repeat_interleave with a tensor: the size of the result depends on the data, which NNEF cannot express.",
            "Pass output_size, or an integer.",
        )
    # Each place belongs to the first element whose repetitions reach beyond it.
    ends = running_sum(b, b.cast(repeats, torch.int64), 0)
    passed = b.binary("le", b.unsqueeze(ends, [0]), positions(b, output_size, 0, 2), dtype=torch.bool)
    count = b.reduce("sum_reduce", b.cast(passed, torch.int64), [1], keepdim=False)
    return b.cast(count, repeats.dtype)

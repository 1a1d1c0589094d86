"""Operators that order elements: sort, topk, medians, mode; and those that look values up in an order: searchsorted, histc.

tract orders with `tract_core_topk`, whose sort is stable (array/topk.rs): equal elements keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument
from generic_export.ops.indexing import gather_elements, positions
from generic_export.ops.reduction import extremum, limit_of, truth, without_axis
from generic_export.ops.shape import axis_of, volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, floor_div, simplify_dim
from generic_export.translate.builder import NnefBuilder, Scalar, Value, ints, shape_argument
from generic_export.translate.registry import translates

aten = torch.ops.aten


def ordered(b: NnefBuilder, value: Value, count: Dim, dim: int, *, descending: bool) -> tuple[Value, Value]:
    """Return the first `count` elements along an axis in order, and where each one lay."""
    if value.rank == 0:
        return value, b.full((), 0, torch.int64)
    axis = axis_of(dim, value.rank)
    comparable = b.cast(value, torch.uint8) if value.dtype is torch.bool else value
    shape = (*value.shape[:axis], count, *value.shape[axis + 1 :])
    attributes: dict[str, Argument] = {"axis": axis, "largest": descending}
    # A count given as a dimension is not evaluated at run ("Undetermined symbol"): it is cast to a number.
    number = count if isinstance(count, int) else b.scalar(count, torch.int64)
    facts = ((shape, comparable.dtype), (shape, torch.int64))
    values, places = b.emit_many("tract_core_topk", [comparable, number], facts, attributes=attributes)
    if not isinstance(count, int):
        # ... and the size of the result is then unknown to tract, which a slice tells it.
        values, places = (_sized(b, part, axis, count) for part in (values, places))
    return b.cast(values, value.dtype), places


def _sized(b: NnefBuilder, value: Value, axis: int, size: Dim) -> Value:
    attributes: dict[str, Argument] = {
        "axes": ints([axis]),
        "begin": shape_argument([0]),
        "end": shape_argument([size]),
    }
    return b.emit("slice", [value], shape=value.shape, dtype=value.dtype, attributes=attributes)


@translates(aten.topk.default)
def topk(
    b: NnefBuilder, self: Value, k: Dim, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)"""
    del sorted  # any order will do when it is False
    return ordered(b, self, k, dim, descending=largest)


@variant(aten.sort.default, stable=None)
@translates(aten.sort.stable)
def sort(
    b: NnefBuilder, self: Value, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Value, Value]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    del stable  # the engine's order always is
    return ordered(b, self, self.shape[dim] if self.rank else 1, dim, descending=descending)


@variant(aten.argsort.default, stable=False)
@translates(aten.argsort.stable)
def argsort(b: NnefBuilder, self: Value, dim: int = -1, descending: bool = False, *, stable: bool) -> Value:
    """argsort.stable(Tensor self, *, bool stable, int dim=-1, bool descending=False) -> Tensor"""
    return sort(b, self, dim, descending, stable=stable)[1]


# --- one element of the order --------------------------------------------------------------------


@translates(aten.kthvalue.default)
def kthvalue(b: NnefBuilder, self: Value, k: Dim, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.rank == 0:
        return self, b.full((), 0, torch.int64)
    axis = axis_of(dim, self.rank)
    before = simplify_dim(sympy.sympify(k) - 1)
    kept = [b.slice(part, axis, before, k) for part in ordered(b, self, k, axis, descending=False)]
    return without_axis(b, kept, axis, keepdim)


@translates(aten.median.dim)
def median_dim(b: NnefBuilder, self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """median.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    size = self.shape[axis_of(dim, self.rank)] if self.rank else 1
    return kthvalue(b, self, floor_div(simplify_dim(sympy.sympify(size) + 1), 2), dim, keepdim)


@translates(aten.nanmedian.dim)
def nanmedian_dim(b: NnefBuilder, self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """nanmedian.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.rank == 0 or not self.dtype.is_floating_point:
        return median_dim(b, self, dim, keepdim)
    axis = axis_of(dim, self.rank)
    missing = b.unary("tract_core_is_nan", self, dtype=torch.bool)
    _, places = sort(b, b.select(missing, b.scalar(math.inf, self.dtype), self), axis)
    count = b.reduce("sum_reduce", b.cast(b.unary("not", missing), torch.int64), [axis], keepdim=True)
    one = b.scalar(1, torch.int64)
    half = b.binary("div", b.binary("sub", b.binary("max", count, one), one), b.scalar(2, torch.int64))
    # The place comes first and the value is read there: a row of NaN gives NaN.
    place = gather_elements(b, places, half, axis)
    value = gather_elements(b, self, place, axis)
    return without_axis(b, [value, place], axis, keepdim)


@variant(aten.median.default, along=median_dim)
@variant(aten.nanmedian.default, along=nanmedian_dim)
def median(b: NnefBuilder, self: Value, *, along: Callable[..., tuple[Value, Value]]) -> Value:
    """median(Tensor self) -> Tensor"""
    return along(b, b.reshape(self, [volume(self.shape)]), 0)[0]


@translates(aten.mode.default)
def mode(b: NnefBuilder, self: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.rank == 0:
        return self, b.full((), 0, torch.int64)
    axis = axis_of(dim, self.rank)
    comparable = b.cast(self, torch.int64) if self.dtype is torch.bool else self
    rows, columns = b.unsqueeze(comparable, [axis + 1]), b.unsqueeze(comparable, [axis])
    equal = b.cast(b.binary("eq", rows, columns, dtype=torch.bool), torch.int64)
    counts = b.reduce("sum_reduce", equal, [axis + 1], keepdim=False)
    frequent = b.binary("eq", counts, b.reduce("max_reduce", counts, [axis], keepdim=True), dtype=torch.bool)
    # The smallest of the most frequent values, and the last place where it lies.
    highest = b.scalar(limit_of(comparable.dtype, lowest=False), comparable.dtype)
    value = extremum(b, "min_reduce", b.select(frequent, comparable, highest), [axis], True)
    here = b.binary("eq", comparable, value, dtype=torch.bool)
    candidates = b.select(here, positions(b, self.shape[axis], axis, self.rank), b.scalar(0, torch.int64))
    place = b.reduce("max_reduce", candidates, [axis], keepdim=True)
    value = b.cast(value, self.dtype)
    return without_axis(b, [value, place], axis, keepdim)


# --- looking values up ---------------------------------------------------------------------------


@translates(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    b: NnefBuilder,
    sorted_sequence: Value,
    self: Value | Scalar,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, ...) -> Tensor"""
    if not isinstance(self, Value):
        self = b.full((), self, torch.float64 if isinstance(self, float) else torch.int64)
    sequence = sorted_sequence
    if sorter is not None:
        sequence = gather_elements(b, sequence, sorter, sequence.rank - 1)
    if sequence.rank > 1:
        sequence = b.unsqueeze(sequence, [sequence.rank - 1])
    return _count_below(b, sequence, self, right=right or side == "right", out_int32=out_int32)


@translates(aten.bucketize.Tensor)
def bucketize(b: NnefBuilder, self: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    return _count_below(b, boundaries, self, right=right, out_int32=out_int32)


def _count_below(b: NnefBuilder, sequence: Value, wanted: Value, *, right: bool, out_int32: bool) -> Value:
    """Count the elements of the sequence's last axis before which each wanted value would go."""
    dtype = torch.promote_types(sequence.dtype, wanted.dtype)
    each = b.unsqueeze(b.cast(wanted, dtype), [wanted.rank])
    below = b.binary("le" if right else "lt", b.cast(sequence, dtype), each, dtype=torch.bool)
    count = b.reduce("sum_reduce", b.cast(below, torch.int64), [below.rank - 1], keepdim=False)
    return b.cast(count, torch.int32 if out_int32 else torch.int64)


@translates(aten.nonzero_static.default)
def nonzero_static(b: NnefBuilder, self: Value, *, size: int, fill_value: int = -1) -> Value:
    """nonzero_static(Tensor self, *, SymInt size, int fill_value=-1) -> Tensor"""
    if not isinstance(size, int):
        raise TranslationError("nonzero_static of a dynamic size is not supported.")
    if self.rank == 0:
        return b.full((size, 0), 0, torch.int64)
    count = volume(self.shape)
    beyond = b.scalar(count, torch.int64)
    # True elements keep their place and the others move behind all places: the first ones in order are the answer.
    places = b.select(truth(b, b.reshape(self, [count])), positions(b, count), beyond)
    padded = b.concat([places, b.broadcast(b.unsqueeze(beyond, [0]), [size])], 0) if size else places
    found = b.unsqueeze(ordered(b, padded, size, 0, descending=False)[0], [1])
    columns, rest = [], found
    for axis in reversed(range(self.rank)):
        length = b.scalar(self.shape[axis], torch.int64)
        above = b.binary("div", rest, length)
        columns.append(b.binary("sub", rest, b.binary("mul", above, length)))
        rest = above
    coordinates = b.concat(columns[::-1], 1)
    missing = b.binary("eq", found, beyond, dtype=torch.bool)
    return b.select(missing, b.scalar(fill_value, torch.int64), coordinates)


# --- histograms ----------------------------------------------------------------------------------


@translates(aten.histc.default)
def histc(b: NnefBuilder, self: Value, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Value:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor"""
    if not self.dtype.is_floating_point:
        raise TranslationError("histc of integers is not supported.")
    flat = b.reshape(self, [volume(self.shape), 1])
    low, high = _bounds(b, flat, None if min == max else (float(min), float(max)), margin=1.0)
    share = b.binary("mul", b.binary("sub", flat, low), b.scalar(float(bins), self.dtype))
    bin_of = b.unary("floor", b.binary("div", share, b.binary("sub", high, low)))
    # The last bin includes its upper bound.
    bin_of = b.binary("min", bin_of, b.scalar(float(bins - 1), self.dtype))
    inside = b.binary("and", b.binary("ge", flat, low, dtype=torch.bool), b.binary("le", flat, high, dtype=torch.bool))
    member = b.binary("eq", bin_of, b.cast(positions(b, bins, 1, 2), self.dtype), dtype=torch.bool)
    return b.reduce("sum_reduce", b.cast(b.binary("and", member, inside), self.dtype), [0], keepdim=False)


@translates(aten.histogram.bin_ct)
def histogram(
    b: NnefBuilder,
    self: Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, Value]:
    """histogram.bin_ct(Tensor self, int bins=100, *, float[]? range=None, Tensor? weight=None, bool density=False)"""
    flat = b.reshape(self, [volume(self.shape), 1])
    low, high = _bounds(b, flat, (float(range[0]), float(range[1])) if range else None, margin=0.5)
    shares = b.binary("div", b.cast(positions(b, bins + 1), self.dtype), b.scalar(float(bins), self.dtype))
    edges = b.binary("add", b.binary("mul", shares, b.binary("sub", high, low)), low)
    return _counted(b, flat, edges, weight, density), edges


@translates(aten.histogram.bins_tensor)
def histogram_between(
    b: NnefBuilder, self: Value, bins: Value, *, weight: Value | None = None, density: bool = False
) -> tuple[Value, Value]:
    """histogram.bins_tensor(Tensor self, Tensor bins, *, Tensor? weight=None, bool density=False) -> (Tensor, Tensor)"""
    return _counted(b, b.reshape(self, [volume(self.shape), 1]), bins, weight, density), bins


def _counted(b: NnefBuilder, flat: Value, edges: Value, weight: Value | None, density: bool) -> Value:
    """Count (or weigh) the values between each two edges; the last bin includes its upper bound."""
    bins = simplify_dim(sympy.sympify(edges.shape[0]) - 1)
    begins = b.unsqueeze(b.slice(edges, 0, 0, bins), [0])
    ends = b.unsqueeze(b.slice(edges, 0, 1, edges.shape[0]), [0])
    final = b.scalar(simplify_dim(sympy.sympify(bins) - 1), torch.int64)
    last = b.binary("eq", positions(b, bins, 1, 2), final, dtype=torch.bool)
    on_the_bound = b.binary("and", last, b.binary("eq", flat, ends, dtype=torch.bool))
    below = b.binary("or", b.binary("lt", flat, ends, dtype=torch.bool), on_the_bound)
    member = b.cast(b.binary("and", b.binary("ge", flat, begins, dtype=torch.bool), below), flat.dtype)
    if weight is not None:
        member = b.binary("mul", member, b.reshape(weight, [volume(weight.shape), 1]))
    counts = b.reduce("sum_reduce", member, [0], keepdim=False)
    if density:
        widths = b.squeeze(b.binary("sub", ends, begins), [0])
        counts = b.binary("div", counts, b.binary("mul", b.reduce("sum_reduce", counts, [0], keepdim=True), widths))
    return counts


def _bounds(b: NnefBuilder, values: Value, given: tuple[float, float] | None, *, margin: float) -> tuple[Value, Value]:
    """Return where a histogram begins and ends: as given, or at the smallest and largest value."""
    if given is not None:
        low, high = given if given[0] != given[1] else (given[0] - margin, given[1] + margin)
        return b.scalar(low, values.dtype), b.scalar(high, values.dtype)
    least, most = (extremum(b, name, values, [0, 1], False) for name in ("min_reduce", "max_reduce"))
    # Where all elements are equal PyTorch widens the range on both sides.
    single = b.binary("eq", least, most, dtype=torch.bool)
    wider = b.scalar(margin, values.dtype)
    return (
        b.select(single, b.binary("sub", least, wider), least),
        b.select(single, b.binary("add", most, wider), most),
    )

"""Operators that write into a copy of a tensor: scatter and its reductions, index_put, slice assignment, masked_scatter."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.compat import torch_sympy
from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument
from generic_export.ops.cumulative import running_sum
from generic_export.ops.indexing import (
    are_neighbours,
    gather,
    index_tensors,
    indexed_first,
    positions,
    slice_bounds,
    within,
    wrap,
)
from generic_export.ops.reduction import limit_of
from generic_export.ops.shape import axis_of, volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, Shape, same_dim, same_shape, simplify_dim
from generic_export.translate.builder import NnefBuilder, Scalar, Value, broadcast_shape
from generic_export.translate.registry import translates

aten = torch.ops.aten

# PyTorch's name of a reduction -> tract's.
_REDUCTIONS = {
    None: "none",
    "add": "add",
    "multiply": "mul",
    "sum": "add",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
    "mean": "add",
}


# --- scatter: one index per element --------------------------------------------------------------


@variant(aten.scatter.src, reduce=None)
@variant(aten.scatter_add.default, reduce="add")
@translates(aten.scatter.reduce)
def scatter(b: NnefBuilder, self: Value, dim: int, index: Value, src: Value, *, reduce: str | None) -> Value:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    return scattered(b, self, dim, index, src, reduce)


@variant(aten.scatter.value, reduce=None)
@translates(aten.scatter.value_reduce)
def scatter_value(b: NnefBuilder, self: Value, dim: int, index: Value, value: Scalar, *, reduce: str | None) -> Value:
    """scatter.value_reduce(Tensor self, int dim, Tensor index, Scalar value, *, str reduce) -> Tensor"""
    return scattered(b, self, dim, index, b.full(index.shape, value, self.dtype), reduce)


@translates(aten.scatter_reduce.two)
def scatter_reduce(
    b: NnefBuilder, self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True)"""
    base = self
    if not include_self:
        neutral = b.full(index.shape, _neutral(reduce, self.dtype), self.dtype)
        base = scattered(b, self, dim, index, neutral, None)
    result = scattered(b, base, dim, index, src, reduce)
    if reduce != "mean":
        return result
    ones = b.full(index.shape, 1, torch.float32)
    counts = scattered(b, b.full(self.shape, int(include_self), torch.float32), dim, index, ones, "add")
    return _divided(b, result, b.binary("max", counts, b.scalar(1.0, torch.float32)))


@translates(aten.index_reduce.default)
def index_reduce(
    b: NnefBuilder, self: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, *, bool include_self=True) -> Tensor"""
    if self.rank == 0:
        lifted = [
            b.unsqueeze(self, [0]),
            *(value if value.rank else b.unsqueeze(value, [0]) for value in (index, source)),
        ]
        return b.squeeze(index_reduce(b, lifted[0], 0, lifted[1], lifted[2], reduce, include_self=include_self), [0])
    axis = axis_of(dim, self.rank)
    along = b.unsqueeze(b.reshape(index, [volume(index.shape)]), [other for other in range(self.rank) if other != axis])
    return scatter_reduce(b, self, axis, b.broadcast(along, source.shape), source, reduce, include_self=include_self)


def _neutral(reduce: str, dtype: torch.dtype) -> Scalar:
    if reduce in ("sum", "mean", "prod"):
        return int(reduce == "prod")
    return limit_of(dtype, lowest=reduce == "amax")


def _divided(b: NnefBuilder, total: Value, counts: Value) -> Value:
    """Divide sums by counts; integers round down, as PyTorch does."""
    if total.dtype.is_floating_point:
        return b.binary("div", total, b.cast(counts, total.dtype))
    exact = b.binary("div", b.cast(total, torch.float64), b.cast(counts, torch.float64))
    return b.cast(b.unary("floor", exact), total.dtype)


def scattered(b: NnefBuilder, base: Value, dim: int, index: Value, updates: Value, reduction: str | None) -> Value:
    """Write elements at the index that each has along an axis; one of PyTorch's reductions combines them with what is there."""
    if base.rank == 0:
        lifted = [b.unsqueeze(value, [0]) if value.rank == 0 else value for value in (base, index, updates)]
        return b.squeeze(scattered(b, lifted[0], 0, lifted[1], lifted[2], reduction), [0])
    if index.rank == 0:
        index = b.unsqueeze(index, [0])
    if updates.rank == 0:
        updates = b.unsqueeze(updates, [0])
    if same_dim(volume(index.shape), 0):
        return base
    for axis, size in enumerate(index.shape):
        # Elements of `src` beyond the index are not written.
        if not same_dim(updates.shape[axis], size):
            updates = b.slice(updates, axis, 0, size)
    if base.dtype is torch.bool and reduction is not None:
        wide = [b.cast(value, torch.int64) for value in (base, updates)]
        return b.cast(scattered(b, wide[0], dim, index, wide[1], reduction), torch.bool)
    attributes: dict[str, Argument] = {"axis": axis_of(dim, base.rank), "reduction": _REDUCTIONS[reduction]}
    operands = [base, index, b.cast(updates, base.dtype)]
    return b.emit("tract_core_scatter_elements", operands, shape=base.shape, dtype=base.dtype, attributes=attributes)


# --- index_put: one index per row ----------------------------------------------------------------


@translates(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    b: NnefBuilder, self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    masks = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(masks) == 1 and masks[0][1].dtype is torch.bool:
        return _put_where(b, self, masks[0][0], masks[0][1], values, accumulate)
    given = index_tensors(b, indices)
    axes = list(given)
    places: Shape = ()
    for index in given.values():
        places = broadcast_shape(places, index.shape)
    rest = [size for axis, size in enumerate(self.shape) if axis not in given]
    start = axes[0] if are_neighbours(axes) else 0
    wanted = [*rest[:start], *places, *rest[start:]]
    updates = b.broadcast(b.align_rank(b.cast(values, self.dtype), len(wanted)), wanted)
    first = list(range(start, start + len(places)))
    updates = b.transpose(updates, indexed_first(first, len(wanted)))
    coordinates = [
        b.broadcast(b.align_rank(wrap(b, index, self.shape[axis]), len(places)), places)
        for axis, index in given.items()
    ]
    order = indexed_first(axes, self.rank)
    written = put_rows(b, b.transpose(self, order), coordinates, updates, accumulate=accumulate)
    return b.transpose(written, [order.index(axis) for axis in range(self.rank)])


def put_rows(
    b: NnefBuilder, base: Value, coordinates: Sequence[Value], updates: Value, *, accumulate: bool = False
) -> Value:
    """Write `updates` at the given coordinates (non-negative) of the leading axes of `base`."""
    if accumulate and base.dtype is torch.bool:
        wide = [b.cast(value, torch.int64) for value in (base, updates)]
        return b.cast(put_rows(b, wide[0], coordinates, wide[1], accumulate=True), torch.bool)
    rank = coordinates[0].rank
    index = b.concat([b.unsqueeze(coordinate, [rank]) for coordinate in coordinates], rank)
    return scatter_nd(b, base, index, updates, "add" if accumulate else "none")


def scatter_nd(b: NnefBuilder, base: Value, index: Value, updates: Value, reduction: str) -> Value:
    """Write `updates` at the coordinates that lie along the last axis of `index`."""
    attributes = {"reduction": reduction}
    operands = [base, index, updates]
    return b.emit("tract_core_scatter_nd", operands, shape=base.shape, dtype=base.dtype, attributes=attributes)


def _put_where(b: NnefBuilder, base: Value, axis: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """`base[mask] = values`: a selection, as long as the values do not depend on how many elements are true."""
    after = base.rank - axis - mask.rank
    chosen = b.unsqueeze(mask, [*range(axis), *range(axis + mask.rank, base.rank)])
    if values.rank > after and not same_dim(values.shape[values.rank - after - 1], 1):
        if axis or values.rank != after + 1:
            raise TranslationError(
                "assignment through a mask of inner axes, with one row per true element, has no NNEF form.",
                "Move the axes of the mask to the front (movedim), assign there, and move them back.",
            )
        values = b.broadcast(_in_turn(b, mask, values), base.shape)
    new = b.cast(values, base.dtype)
    if after < values.rank < base.rank:
        # The axis of the true elements (of size 1) becomes the axes of the mask.
        shape = list(values.shape)
        at = values.rank - after - 1
        new = b.reshape(new, [*shape[:at], *[1] * mask.rank, *shape[at + 1 :]])
    if accumulate:
        new = b.binary("add", base, new)
    return b.select(b.broadcast(chosen, base.shape), new, base)


@translates(aten.put.default)
def put(b: NnefBuilder, self: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    count = volume(self.shape)
    flat = b.reshape(self, [count])
    places = wrap(b, b.cast(b.reshape(index, [volume(index.shape)]), torch.int64), count)
    updates = b.reshape(source, [volume(source.shape)])
    return b.reshape(put_rows(b, flat, [places], updates, accumulate=accumulate), self.shape)


@translates(aten.masked_scatter.default)
def masked_scatter(b: NnefBuilder, self: Value, mask: Value, source: Value) -> Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    shape = broadcast_shape(self.shape, mask.shape)
    base, chosen = (b.broadcast(b.align_rank(value, len(shape)), shape) for value in (self, mask))
    if same_dim(volume(source.shape), 0):
        return base
    return b.select(chosen, _in_turn(b, chosen, b.reshape(source, [volume(source.shape)])), base)


def _in_turn(b: NnefBuilder, mask: Value, rows: Value) -> Value:
    """Return rows [N, ...] as [*mask.shape, ...]: the n-th row at the n-th true element, any of them elsewhere."""
    flat = b.cast(b.reshape(mask, [volume(mask.shape)]), torch.int64)
    one, zero = b.scalar(1, torch.int64), b.scalar(0, torch.int64)
    turn = b.binary("max", b.binary("sub", running_sum(b, flat, 0), one), zero)
    last = simplify_dim(torch_sympy.Max(0, sympy.sympify(rows.shape[0]) - 1))  # one row is for all elements
    may_be_empty = not isinstance(last, int) or same_dim(rows.shape[0], 0)
    if may_be_empty:  # a gather from no rows ends the engine
        rows = b.concat([rows, b.full((1, *rows.shape[1:]), 0, rows.dtype)], 0)
    taken = gather(b, rows, b.binary("min", turn, b.scalar(last, torch.int64)), 0)
    return b.reshape(taken, [*mask.shape, *rows.shape[1:]])


# --- slice assignment ----------------------------------------------------------------------------


@translates(aten.slice_scatter.default)
def slice_scatter(
    b: NnefBuilder,
    self: Value,
    src: Value,
    dim: int = 0,
    start: Dim | None = None,
    end: Dim | None = None,
    step: Dim = 1,
) -> Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    begin, stop = slice_bounds(start, end, size)
    if not isinstance(step, int):
        raise TranslationError("assignment to a slice with a dynamic step has no NNEF form.")
    new = b.cast(src, self.dtype)
    if same_dim(new.shape[axis], 0):
        return self
    length = simplify_dim(sympy.sympify(stop) - sympy.sympify(begin))
    if step == 1 and same_dim(length, new.shape[axis]):
        before, after = b.slice(self, axis, 0, begin), b.slice(self, axis, stop, size)
        return b.concat([part for part in (before, new, after) if not same_dim(part.shape[axis], 0)], axis)
    order = indexed_first([axis], self.rank)
    steps = b.binary("mul", positions(b, new.shape[axis]), b.scalar(step, torch.int64))
    places = b.binary("add", steps, b.scalar(within(begin, size), torch.int64))
    written = put_rows(b, b.transpose(self, order), [places], b.transpose(new, order))
    return b.transpose(written, [order.index(axis) for axis in range(self.rank)])


@translates(aten.select_scatter.default)
def select_scatter(b: NnefBuilder, self: Value, src: Value, dim: int, index: Dim) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    axis = axis_of(dim, self.rank)
    begin, _ = slice_bounds(index, None, self.shape[axis])
    end = simplify_dim(sympy.sympify(begin) + 1)
    return slice_scatter(b, self, b.unsqueeze(src, [axis]), axis, begin, end)


@translates(aten.copy.default)
def copy(b: NnefBuilder, self: Value, src: Value) -> Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor: `src` in the shape and type of `self`"""
    new = b.cast(src, self.dtype)
    return new if same_shape(new.shape, self.shape) else b.broadcast(b.align_rank(new, self.rank), self.shape)

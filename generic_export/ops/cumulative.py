"""Running sums, products and extrema along one axis."""

from __future__ import annotations

import torch

from generic_export.nnef.graph import Argument
from generic_export.ops.indexing import positions
from generic_export.ops.reduction import extremum, limit_of, widened
from generic_export.ops.shape import axis_of
from generic_export.ops.variants import variant
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten


def running_sum(b: NnefBuilder, value: Value, axis: int) -> Value:
    """Add up along an axis, each place counting itself."""
    attributes: dict[str, Argument] = {"axis": axis, "exclusive": False, "reverse": False}
    return b.emit("tract_core_cumsum", [value], shape=value.shape, dtype=value.dtype, attributes=attributes)


@variant(aten.cumsum.default, operator="add")
@variant(aten.cumprod.default, operator="mul")
def cumsum(b: NnefBuilder, self: Value, dim: int, *, dtype: torch.dtype | None = None, operator: str) -> Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    wanted = dtype or (self.dtype if self.dtype.is_floating_point else torch.int64)
    value = b.cast(self, wanted)
    if value.rank == 0:
        return value
    wide, axis = widened(b, value), axis_of(dim, value.rank)
    return b.cast(running_sum(b, wide, axis) if operator == "add" else _running(b, operator, wide, axis), wanted)


@variant(aten.cummax.default, operator="max")
@variant(aten.cummin.default, operator="min")
def cummax(b: NnefBuilder, self: Value, dim: int, *, operator: str) -> tuple[Value, Value]:
    """cummax(Tensor self, int dim) -> (Tensor values, Tensor indices)"""
    if self.rank == 0:
        return self, b.full((), 0, torch.int64)
    axis = axis_of(dim, self.rank)
    comparable = b.cast(self, torch.int64) if self.dtype is torch.bool else self
    best = _running(b, operator, comparable, axis)
    # Of equal elements PyTorch names the last one seen.
    here = b.binary("eq", comparable, best, dtype=torch.bool)
    candidates = b.select(here, positions(b, self.shape[axis], axis, self.rank), b.scalar(0, torch.int64))
    return b.cast(best, self.dtype), _running(b, "max", candidates, axis)


@translates(aten.logcumsumexp.default)
def logcumsumexp(b: NnefBuilder, self: Value, dim: int) -> Value:
    """logcumsumexp(Tensor self, int dim) -> Tensor"""
    if self.rank == 0:
        return self
    value, restored = _last(b, widened(b, self), axis_of(dim, self.rank))
    # Finite bounds: inf - inf is not a number.
    limit = torch.finfo(torch.float32).max
    top = b.binary("max", _running(b, "max", value, value.rank - 1), b.scalar(-limit, value.dtype))
    top = b.binary("min", top, b.scalar(limit, value.dtype))
    shares = b.unary("exp", b.binary("sub", b.unsqueeze(value, [value.rank - 1]), b.unsqueeze(top, [value.rank])))
    kept = b.select(_seen(b, value), shares, b.scalar(0.0, value.dtype))
    total = b.reduce("sum_reduce", kept, [value.rank], keepdim=False)
    return b.cast(b.transpose(b.binary("add", b.unary("log", total), top), restored), self.dtype)


# --- the two ways to combine each place with all those before it ---------------------------------

_REDUCERS = {"mul": "tract_core_product_reduce", "max": "max_reduce", "min": "min_reduce"}


def _running(b: NnefBuilder, operator: str, value: Value, axis: int) -> Value:
    """Combine each place with all those before it: by doubling, or by a square table when the size is not known."""
    size = value.shape[axis]
    return _doubled(b, operator, value, axis, size) if isinstance(size, int) else _tabulated(b, operator, value, axis)


def _doubled(b: NnefBuilder, operator: str, value: Value, axis: int, size: int) -> Value:
    """Look one place back, then two, four ...: log2(size) steps."""
    step = 1
    while step < size:
        tail = b.binary(operator, b.slice(value, axis, step, size), b.slice(value, axis, 0, size - step))
        value = b.concat([b.slice(value, axis, 0, step), tail], axis)
        step *= 2
    return value


def _tabulated(b: NnefBuilder, operator: str, value: Value, axis: int) -> Value:
    last, restored = _last(b, value, axis)
    neutral = 1 if operator == "mul" else limit_of(value.dtype, lowest=operator == "max")
    seen = b.select(_seen(b, last), b.unsqueeze(last, [last.rank - 1]), b.scalar(neutral, value.dtype))
    if operator == "mul":
        result = b.reduce(_REDUCERS[operator], seen, [last.rank], keepdim=False)
    else:
        result = extremum(b, _REDUCERS[operator], seen, [last.rank], keepdim=False)
    return b.transpose(result, restored)


def _last(b: NnefBuilder, value: Value, axis: int) -> tuple[Value, list[int]]:
    """Move an axis to the end; also return the permutation that puts it back."""
    order = list(range(value.rank))
    order[axis], order[-1] = order[-1], order[axis]
    return b.transpose(value, order), order


def _seen(b: NnefBuilder, value: Value) -> Value:
    """Say which places (columns) each place (row) of the last axis combines: itself and those before it."""
    size = value.shape[-1]
    columns, rows = positions(b, size, 1, 2), positions(b, size, 0, 2)
    return b.align_rank(b.binary("le", columns, rows, dtype=torch.bool), value.rank + 1)

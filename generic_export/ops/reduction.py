"""Reductions and softmax: sums, means, products, extrema, truth, variance, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
import torch

from generic_export.ops.indexing import gather_elements
from generic_export.ops.shape import axis_of, volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Scalar, Value, ints
from generic_export.translate.registry import translates

aten = torch.ops.aten

_WIDE_INTEGERS = (torch.int32, torch.int64)
_IDENTITIES: dict[str, Scalar] = {
    "sum_reduce": 0,
    "tract_core_product_reduce": 1,
    "any_reduce": False,
    "all_reduce": True,
}


def reduced_axes(dim: Sequence[int] | int | None, rank: int) -> list[int]:
    """Return the axes of a reduction as non-negative positions; none given means all.

    To tract `axes=[]` means none, and a negative axis aborts (docs/contributing/engine-facts.md#operators-of-tract_nnef).
    """
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(rank))
    given = [dim] if isinstance(dim, int) else dim
    return sorted({axis_of(axis, rank) for axis in given}) if rank else []


def reduce_axes(b: NnefBuilder, operator: str, value: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """Reduce along axes; a tensor without axes is its own reduction, and an empty axis gives the neutral element."""
    if not axes:
        return value
    if operator in _IDENTITIES and any(same_dim(value.shape[axis], 0) for axis in axes):
        # tract's float sum divides by the length of the axis: an empty one aborts the process.
        kept = [1 if axis in axes else dim for axis, dim in enumerate(value.shape) if keepdim or axis not in axes]
        return b.full(tuple(kept), _IDENTITIES[operator], value.dtype)
    return b.reduce(operator, value, axes, keepdim=keepdim)


def limit_of(dtype: torch.dtype, *, lowest: bool) -> Scalar:
    """Return the lowest or highest value of an element type, infinity for floats."""
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def widened(b: NnefBuilder, value: Value) -> Value:
    """Return f16 values in f32: PyTorch accumulates in f32 on every device."""
    return b.cast(value, torch.float32) if value.dtype is torch.float16 else value


# --- sums, means, products -----------------------------------------------------------------------


def sum_of(b: NnefBuilder, value: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """Add up in the value's element type."""
    wide = widened(b, value)
    if value.dtype in _WIDE_INTEGERS and axes:
        # tract adds integers in i32, whatever their type (nn/reduce.rs q_sum_t): f64 is exact up to 2^53.
        wide = b.cast(value, torch.float64)
    return b.cast(reduce_axes(b, "sum_reduce", wide, axes, keepdim), value.dtype)


@variant(aten.sum.default, dim=None, keepdim=False)
@translates(aten.sum.dim_IntList)
def sum_dim(
    b: NnefBuilder, self: Value, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    axes = reduced_axes(dim, self.rank)
    keeps = self.dtype.is_floating_point or self.dtype.is_complex
    wanted = dtype or (self.dtype if keeps else torch.int64)
    if self.dtype is torch.bool and wanted is torch.int64:
        return reduce_axes(b, "sum_reduce", b.cast(self, torch.int64), axes, keepdim)  # a count fits in i32
    return sum_of(b, b.cast(self, wanted), axes, keepdim)


@variant(aten.mean.default, dim=None, keepdim=False)
@translates(aten.mean.dim)
def mean(
    b: NnefBuilder, self: Value, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    value = b.cast(self, dtype or self.dtype)
    axes = reduced_axes(dim, self.rank)
    if any(same_dim(self.shape[axis], 0) for axis in axes):
        empty = sum_of(b, value, axes, keepdim)
        return b.binary("div", empty, empty)  # 0/0: NNEF has no literal for NaN
    return b.cast(reduce_axes(b, "mean_reduce", widened(b, value), axes, keepdim), value.dtype)


@variant(aten.prod.default, dim=None, keepdim=False)
@translates(aten.prod.dim_int)
def prod(
    b: NnefBuilder, self: Value, dim: int | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    wanted = dtype or (self.dtype if self.dtype.is_floating_point else torch.int64)
    factors = widened(b, b.cast(self, wanted))
    axes = reduced_axes(dim, self.rank)
    return b.cast(reduce_axes(b, "tract_core_product_reduce", factors, axes, keepdim), wanted)


@translates(aten.logsumexp.default)
def logsumexp(b: NnefBuilder, self: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    result = self.dtype if self.dtype.is_floating_point else torch.get_default_dtype()
    value = widened(b, b.cast(self, result))
    axes = reduced_axes(dim, self.rank)
    if not axes:
        return b.cast(value, result)
    # A maximum of +inf would give inf - inf; that of a row of -inf is the lowest finite number already.
    limit = b.scalar(torch.finfo(torch.float32).max, value.dtype)
    top = b.binary("min", b.reduce("max_reduce", value, axes, keepdim=True), limit)
    total = b.reduce("sum_reduce", b.unary("exp", b.binary("sub", value, top)), axes, keepdim=True)
    kept = b.binary("add", b.unary("log", total), top)
    return b.cast(kept if keepdim else b.squeeze(kept, axes), result)


# --- extrema -------------------------------------------------------------------------------------


def extremum(b: NnefBuilder, operator: str, value: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """Take the largest (`max_reduce`) or smallest (`min_reduce`) element along axes."""
    if not axes:
        return value
    if value.dtype is torch.bool:
        return b.reduce("any_reduce" if operator == "max_reduce" else "all_reduce", value, axes, keepdim=keepdim)
    result = b.reduce(operator, value, axes, keepdim=keepdim)
    if not value.dtype.is_floating_point:
        return result
    # tract starts from the lowest finite number (nn/reduce.rs max_t): a row of -inf would give -3.4e38.
    comparison, worst = ("gt", -math.inf) if operator == "max_reduce" else ("lt", math.inf)
    bound = b.scalar(worst, value.dtype)
    better = b.reduce("any_reduce", b.binary(comparison, value, bound, dtype=torch.bool), axes, keepdim=keepdim)
    return b.select(better, result, bound)


@variant(aten.max.default, operator="max_reduce", dim=(), keepdim=False)
@variant(aten.min.default, operator="min_reduce", dim=(), keepdim=False)
@variant(aten.amax.default, operator="max_reduce")
@variant(aten.amin.default, operator="min_reduce")
def amax(b: NnefBuilder, self: Value, dim: Sequence[int] = (), keepdim: bool = False, *, operator: str) -> Value:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return extremum(b, operator, self, reduced_axes(dim, self.rank), keepdim)


@variant(aten.max.dim, operator="argmax_reduce")
@variant(aten.min.dim, operator="argmin_reduce")
def max_dim(b: NnefBuilder, self: Value, dim: int, keepdim: bool = False, *, operator: str) -> tuple[Value, Value]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if self.rank == 0:
        return self, b.full((), 0, torch.int64)
    axis = axis_of(dim, self.rank)
    position = _position(b, operator, self, [axis])
    return without_axis(b, [gather_elements(b, self, position, axis), position], axis, keepdim)


def without_axis(b: NnefBuilder, values: Sequence[Value], axis: int, keepdim: bool) -> tuple[Value, Value]:
    """Return an extremum, median ... and where it lies, with or without the axis of size 1 that it was taken along."""
    best, position = values if keepdim else [b.squeeze(value, [axis]) for value in values]
    return best, position


def _position(b: NnefBuilder, operator: str, value: Value, axes: Sequence[int]) -> Value:
    comparable = b.cast(value, torch.uint8) if value.dtype is torch.bool else value
    return b.reduce(operator, comparable, axes, keepdim=True, dtype=torch.int64)


@variant(aten.argmax.default, operator="argmax_reduce")
@variant(aten.argmin.default, operator="argmin_reduce")
def argmax(b: NnefBuilder, self: Value, dim: int | None = None, keepdim: bool = False, *, operator: str) -> Value:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    if self.rank == 0:
        return b.full((), 0, torch.int64)
    if dim is None:
        position = _position(b, operator, b.reshape(self, [volume(self.shape)]), [0])
        return b.reshape(position, [1] * self.rank if keepdim else [])
    axis = axis_of(dim, self.rank)
    position = _position(b, operator, self, [axis])
    return position if keepdim else b.squeeze(position, [axis])


# --- truth ---------------------------------------------------------------------------------------


def truth(b: NnefBuilder, value: Value) -> Value:
    """Say, for each element, whether it is not zero."""
    if value.dtype is torch.bool:
        return value
    return b.binary("ne", value, b.scalar(0, value.dtype), dtype=torch.bool)


@variant(aten.any.default, operator="any_reduce", dim=None, keepdim=False)
@variant(aten.all.default, operator="all_reduce", dim=None, keepdim=False)
@variant(aten.any.dim, aten.any.dims, operator="any_reduce")
@variant(aten.all.dim, aten.all.dims, operator="all_reduce")
def any_or_all(
    b: NnefBuilder, self: Value, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, operator: str
) -> Value:
    """any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    result = reduce_axes(b, operator, truth(b, self), reduced_axes(dim, self.rank), keepdim)
    return b.cast(result, torch.uint8) if self.dtype is torch.uint8 else result


# --- spread and length ---------------------------------------------------------------------------


@variant(aten.var.correction, results=1)
@variant(aten.var_mean.correction, results=2)
def var_mean(
    b: NnefBuilder,
    self: Value,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    results: int,
) -> tuple[Value, ...]:
    """var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> ..."""
    axes = reduced_axes(dim, self.rank)
    value = widened(b, self)
    average = mean(b, value, axes, keepdim=True) if axes else value
    squares = sum_of(b, b.unary("square", b.binary("sub", value, average)), axes, keepdim)
    freedom = simplify_dim(sympy.sympify(volume([self.shape[axis] for axis in axes])))
    spread = b.binary("div", squares, _degrees(b, freedom, 1 if correction is None else correction, value.dtype))
    centre = average if keepdim else b.squeeze(average, axes)
    return (b.cast(spread, self.dtype), b.cast(centre, self.dtype))[:results]


def _degrees(b: NnefBuilder, count: Dim, correction: float, dtype: torch.dtype) -> Value:
    """Return `count - correction`, at least 0, as a number."""
    if isinstance(count, int):
        return b.scalar(max(float(count - correction), 0.0), dtype)
    return b.binary("sub", b.scalar(count, dtype), b.scalar(float(correction), dtype))


@translates(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    b: NnefBuilder,
    self: Value,
    ord: Scalar = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None)"""
    axes = reduced_axes(dim, self.rank)
    result = dtype or self.dtype
    value = widened(b, b.cast(self, result))
    if ord == 0:
        return b.cast(sum_of(b, b.cast(truth(b, value), torch.float32), axes, keepdim), result)
    if ord == 2:
        return b.cast(b.unary("sqrt", sum_of(b, b.unary("square", value), axes, keepdim)), result)
    length = b.unary("abs", value)
    if math.isinf(ord):
        return b.cast(extremum(b, "max_reduce" if ord > 0 else "min_reduce", length, axes, keepdim), result)
    if ord == 1:
        return b.cast(sum_of(b, length, axes, keepdim), result)
    powers = sum_of(b, b.binary("pow", length, b.scalar(float(ord), value.dtype)), axes, keepdim)
    return b.cast(b.binary("pow", powers, b.scalar(1.0 / float(ord), value.dtype)), result)


@translates(aten.softmax.int)
def softmax(b: NnefBuilder, self: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """softmax.int(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    value = b.cast(self, dtype) if dtype is not None else self
    if value.rank == 0:
        return b.full((), 1.0, value.dtype)
    # docs/contributing/engine-facts.md#operators-of-tract_nnef: the default axis is 1.
    attributes = {"axes": ints([axis_of(dim, value.rank)])}
    return b.emit("softmax", [value], shape=value.shape, dtype=value.dtype, attributes=attributes)


@translates(aten._softmax.default)
def softmax_of_kernel(b: NnefBuilder, self: Value, dim: int, half_to_float: bool) -> Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    return softmax(b, self, dim, torch.float32 if half_to_float else None)

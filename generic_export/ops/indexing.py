"""Operators that pick elements: slices, gathers, embedding tables; and those that make index ranges and fills."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, DimLiteral
from generic_export.ops.builder import NnefBuilder, Scalar, Value, tract_dtype
from generic_export.ops.registry import translates
from generic_export.ops.shape import axis_of
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, simplify_dim, smaller_dim

aten = torch.ops.aten

_END_OF_AXIS = 2**62  # PyTorch spells "to the end" as the largest 64-bit integer


def _bound(position: Dim | None, size: Dim, default: Dim) -> Dim:
    """Return a Python slice bound as a position between 0 and `size`."""
    if position is None:
        return default
    if isinstance(position, int):
        if position >= _END_OF_AXIS:
            return size
        if position < 0:
            shifted = simplify_dim(sympy.sympify(size) + position)
            return max(shifted, 0) if isinstance(shifted, int) else shifted
        # A constant bound of a dynamic axis is taken as it is, as PyTorch does: shorter tensors are not meant.
        return min(position, size) if isinstance(size, int) else position
    return smaller_dim(position, size)


@translates(aten.slice.Tensor)
def slice_tensor(
    b: NnefBuilder, self: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> Value:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    if not isinstance(step, int):
        raise TranslationError(f"slice with a dynamic step {dim_text(step)} has no NNEF form.")
    begin, stop = _bound(start, size, 0), _bound(end, size, size)
    if isinstance(begin, int) and isinstance(stop, int):
        stop = max(begin, stop)
    return b.slice(self, axis, begin, stop, step)


@translates(aten.select.int)
def select_int(b: NnefBuilder, self: Value, dim: int, index: Dim) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    begin = _bound(index, self.shape[axis], 0)
    end = simplify_dim(sympy.sympify(begin) + 1)
    return b.squeeze(b.slice(self, axis, begin, end), [axis])


@translates(aten.narrow.default)
def narrow(b: NnefBuilder, self: Value, dim: int, start: Dim, length: Dim) -> Value:
    """narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    begin = _bound(start, self.shape[axis], 0)
    return b.slice(self, axis, begin, simplify_dim(sympy.sympify(begin) + sympy.sympify(length)))


def gather(b: NnefBuilder, table: Value, indices: Value, axis: int) -> Value:
    """Pick slices of `table` along `axis` at `indices` (any rank, non-negative, in range: tract aborts otherwise)."""
    shape = [*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :]]
    attributes: dict[str, Argument] = {"axis": axis, "datum_type": tract_dtype(table.dtype)}
    return b.emit("tract_core_gather", [table, indices], shape=shape, dtype=table.dtype, attributes=attributes)


@translates(aten.embedding.default)
def embedding(b: NnefBuilder, weight: Value, indices: Value, padding_idx: Dim = -1) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, ...) -> Tensor"""
    del padding_idx  # only gradients look at it
    return gather(b, _table(b, weight), indices, 0)


def _table(b: NnefBuilder, weight: Value) -> Value:
    """Return the embedding table, as a constant of its own when a matrix product reads the same tensor.

    tract packs the weight of a product once, at load, but re-packs it at every run when anything else reads that very
    constant (measured in docs/engine-notes.md: 16 x slower LM head). Folding the table out and back costs nothing in
    the archive and gives the gather its own constant.
    """
    label = b.label_of(weight)
    columns = weight.shape[-1]
    if label not in b.shared_parameters or weight.rank != 2 or not isinstance(columns, int) or columns % 2:
        return weight
    return b.reshape(b.reshape(weight, [weight.shape[0], 2, columns // 2]), weight.shape)


@translates(aten.index_select.default)
def index_select(b: NnefBuilder, self: Value, dim: int, index: Value) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    return gather(b, self, index, axis_of(dim, self.rank))


@translates(aten.index.Tensor)
def index_tensor(b: NnefBuilder, self: Value, indices: Sequence[Value | None]) -> Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor: one integer index tensor"""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype is torch.bool:
        raise TranslationError("indexing with several index tensors, or with a mask, has no translation yet.")
    axis, index = given[0]
    return gather(b, self, index, axis)


# --- ranges and fills ----------------------------------------------------------------------------


def _range(b: NnefBuilder, start: Dim, end: Dim, step: Dim, dtype: torch.dtype | None) -> Value:
    for bound in (start, end, step):
        if isinstance(bound, float):
            raise TranslationError("arange with float bounds has no translation yet.")
    if not isinstance(step, int) or step == 0:
        raise TranslationError(f"arange with the step {step!r} has no translation yet.")
    span = sympy.sympify(end) - sympy.sympify(start) if step > 0 else sympy.sympify(start) - sympy.sympify(end)
    length = floor_div(simplify_dim(span + abs(step) - 1), abs(step))
    bounds: list[Argument] = [DimLiteral(dim_text(bound)) for bound in (start, end, step)]
    # facts/tract.md §3.2: dimension arguments give an i64 tensor of exact symbolic length.
    value = b.emit("tract_core_range", bounds, shape=[length], dtype=torch.int64)
    return b.cast(value, dtype or torch.int64)


@translates(aten.arange.default)
def arange(b: NnefBuilder, end: Dim, *, dtype: torch.dtype | None = None) -> Value:
    """arange(Scalar end, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _range(b, 0, end, 1, dtype)


@translates(aten.arange.start)
def arange_start(b: NnefBuilder, start: Dim, end: Dim, *, dtype: torch.dtype | None = None) -> Value:
    """arange.start(Scalar start, Scalar end, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _range(b, start, end, 1, dtype)


@translates(aten.arange.start_step)
def arange_start_step(
    b: NnefBuilder, start: Dim, end: Dim, step: Dim = 1, *, dtype: torch.dtype | None = None
) -> Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _range(b, start, end, step, dtype)


@translates(aten.full.default)
def full(b: NnefBuilder, size: Sequence[Dim], fill_value: Scalar, *, dtype: torch.dtype | None = None) -> Value:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    inferred = torch.full((), fill_value).dtype if not isinstance(fill_value, sympy.Expr) else torch.int64
    return b.full(tuple(size), fill_value, dtype or inferred)


@translates(aten.full_like.default)
def full_like(b: NnefBuilder, self: Value, fill_value: Scalar, *, dtype: torch.dtype | None = None) -> Value:
    """full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full(self.shape, fill_value, dtype or self.dtype)


@translates(aten.new_full.default)
def new_full(
    b: NnefBuilder, self: Value, size: Sequence[Dim], fill_value: Scalar, *, dtype: torch.dtype | None = None
) -> Value:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full(tuple(size), fill_value, dtype or self.dtype)


@translates(aten.new_ones.default)
def new_ones(b: NnefBuilder, self: Value, size: Sequence[Dim], *, dtype: torch.dtype | None = None) -> Value:
    """new_ones(Tensor self, SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full(tuple(size), 1, dtype or self.dtype)


@translates(aten.new_zeros.default)
def new_zeros(b: NnefBuilder, self: Value, size: Sequence[Dim], *, dtype: torch.dtype | None = None) -> Value:
    """new_zeros(Tensor self, SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full(tuple(size), 0, dtype or self.dtype)


@translates(aten.ones.default)
def ones(b: NnefBuilder, size: Sequence[Dim], *, dtype: torch.dtype | None = None) -> Value:
    """ones(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full(tuple(size), 1, dtype or torch.get_default_dtype())


@translates(aten.zeros.default)
def zeros(b: NnefBuilder, size: Sequence[Dim], *, dtype: torch.dtype | None = None) -> Value:
    """zeros(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full(tuple(size), 0, dtype or torch.get_default_dtype())


@translates(aten.scalar_tensor.default)
def scalar_tensor(b: NnefBuilder, s: Scalar, *, dtype: torch.dtype | None = None) -> Value:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full((), s, dtype or torch.get_default_dtype())


__all__ = ["gather"]

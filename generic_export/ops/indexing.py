"""Operators that pick elements: slices, gathers, embedding tables; and those that make index ranges and fills."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from generic_export.compat import EXTREMA, torch_sympy
from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral, DimLiteral
from generic_export.ops.shape import axis_of, volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import (
    Dim,
    Shape,
    dim_text,
    expand_dim,
    floor_div,
    same_dim,
    simplify_dim,
    smaller_dim,
)
from generic_export.torch_graph.sizes.proofs import never_negative
from generic_export.translate.builder import NnefBuilder, Scalar, Value, broadcast_shape, tract_dtype
from generic_export.translate.complex_layout import COMPONENT_DTYPES, as_complex
from generic_export.translate.registry import translates
from generic_export.translate.value import values_in

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
    if position.is_nonpositive:  # `x[-y.shape[1]:]`: counted from the end, as a negative number is
        return simplify_dim(sympy.sympify(size) + position)
    return smaller_dim(position, size)


def slice_bounds(start: Dim | None, end: Dim | None, size: Dim) -> tuple[Dim, Dim]:
    """Return where a Python slice of an axis begins and ends, as positions between 0 and `size`."""
    begin, stop = _bound(start, size, 0), _bound(end, size, size)
    if isinstance(begin, int) and isinstance(stop, int):
        stop = max(begin, stop)
    return begin, stop


@translates(aten.slice.Tensor)
def slice_tensor(
    b: NnefBuilder, self: Value, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: Dim = 1
) -> Value:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    if not isinstance(step, int):
        raise TranslationError(f"slice with a dynamic step {dim_text(step)} has no NNEF form.")
    begin, stop = slice_bounds(start, end, size)
    (length,) = {shape[axis] for shape in b.result_shapes}
    span = simplify_dim(sympy.sympify(stop) - sympy.sympify(begin) + step - 1)
    if not same_dim(floor_div(span, step), length):
        # The axis may be shorter than the slice asks for. tract proves sizes equal by their form: it has to be PyTorch's.
        counted_back = _from_the_end(start, stop, size, length)
        begin = within(begin, size) if counted_back is None else counted_back
        if step != 1:
            return _strided(b, self, axis, begin, length, step)
        stop = _ending(begin, length)
    if step != 1 and (_was_reshaped(b, self, axis) or _is_a_cut(b, self, axis)):
        return _strided(b, self, axis, begin, length, step)
    if step == 1 and isinstance(stop, sympy.Expr):
        stop = _ending(begin, length)
    return b.slice(self, axis, begin, stop, step)


def _from_the_end(start: Dim | None, stop: Dim, size: Dim, length: Dim) -> Dim | None:
    """Return the position of a start that PyTorch counted from the end, which the length of the result shows; None otherwise.

    In `x[:, T // 2 - 4 :]` the start is negative if T is below 8.
    """
    if not isinstance(start, sympy.Expr) or start.is_nonnegative or start.is_nonpositive:
        return None
    begin = within(simplify_dim(sympy.sympify(size) + start), size)
    left = sympy.sympify(stop) - begin
    forms = (left, torch_sympy.Max(left, 0))
    return begin if any(same_dim(simplify_dim(form), length) for form in forms) else None


def _ending(begin: Dim, length: Dim) -> Dim:
    """Return where a cut ends, as a sum in which tract finds its length again: it subtracts where the cut begins."""
    return expand_dim(sympy.sympify(begin) + sympy.sympify(length))


def _strided(b: NnefBuilder, value: Value, axis: int, begin: Dim, length: Dim, step: int) -> Value:
    strides = b.binary("mul", positions(b, length), b.scalar(step, torch.int64))
    return gather(b, value, b.binary("add", strides, b.scalar(begin, torch.int64)), axis)


def _was_reshaped(b: NnefBuilder, value: Value, axis: int) -> bool:
    """Say whether an axis is one that a reshape made: tract takes strides before the reshape, and finds no such axis there."""
    maker = b.maker_of(value)
    while (
        maker is not None and maker.operator in ("slice", "tract_core_gather") and maker.outputs[0].rank == value.rank
    ):
        maker = b.maker_of(values_in(maker.inputs)[0])
    if maker is None or maker.operator != "reshape":
        return False
    attributes: dict[str, Any] = dict(maker.attributes)
    first = int(attributes["axis_start"])
    return first <= axis < first + len(attributes["shape"].elements)


_ELEMENTWISE = ("add", "sub", "mul", "div", "neg", "tract_core_cast")


def _is_a_cut(b: NnefBuilder, value: Value, axis: int) -> bool:
    """Say whether an axis is what a slice of a dynamic one left: tract swaps the two slices without an end, or finds no size."""
    size = value.shape[axis]
    if not isinstance(size, sympy.Expr):
        return False
    if size.has(*EXTREMA):
        return True
    maker = b.maker_of(value)
    while maker is not None and maker.operator in _ELEMENTWISE:
        maker = next((found for each in values_in(maker.inputs) if (found := b.maker_of(each)) is not None), None)
    return maker is not None and maker.operator == "slice"


def within(position: Dim, size: Dim) -> Dim:
    """Return a position of a dynamic axis as it is in an axis that ends before it."""
    if isinstance(position, int):
        return position if position <= 1 and _has_elements(size) else smaller_dim(position, size)
    return position if position.is_nonnegative else simplify_dim(torch_sympy.Max(0, position))


def _has_elements(size: Dim) -> bool:
    """Say whether an axis has an element wherever the inputs have some."""
    expr = sympy.sympify(size)
    return never_negative(sympy.expand(expr.subs({symbol: symbol + 1 for symbol in expr.free_symbols})) - 1)


@translates(aten.select.int)
def select_int(b: NnefBuilder, self: Value, dim: int, index: Dim) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    begin = _bound(index, self.shape[axis], 0)
    end = simplify_dim(sympy.sympify(begin) + 1)
    return b.squeeze(b.slice(self, axis, begin, end), [axis])


@translates(aten.narrow.default, aten.narrow_copy.default)
def narrow(b: NnefBuilder, self: Value, dim: int, start: Dim, length: Dim) -> Value:
    """narrow(Tensor(a) self, int dim, SymInt start, SymInt length) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    begin = _bound(start, self.shape[axis], 0)
    (length,) = {shape[axis] for shape in b.result_shapes}  # PyTorch's own, which may be `max(T - 2, 0)`
    return b.slice(self, axis, begin, _ending(begin, length))


def gather_elements(b: NnefBuilder, value: Value, indices: Value, axis: int) -> Value:
    """Pick, at each place of `indices`, the element that lies at that index of `axis` (negative indices are fine)."""
    attributes: dict[str, Argument] = {"axis": axis}
    return b.emit(
        "tract_core_gather_elements", [value, indices], shape=indices.shape, dtype=value.dtype, attributes=attributes
    )


def gather(b: NnefBuilder, table: Value, indices: Value, axis: int) -> Value:
    """Pick slices of `table` along `axis` at `indices` (any rank, in range: tract aborts otherwise)."""
    shape = [*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :]]
    carried = COMPONENT_DTYPES.get(table.dtype, table.dtype)
    attributes: dict[str, Argument] = {"axis": axis, "datum_type": tract_dtype(carried)}
    return b.emit("tract_core_gather", [table, indices], shape=shape, dtype=table.dtype, attributes=attributes)


@translates(aten.embedding.default)
def embedding(b: NnefBuilder, weight: Value, indices: Value, padding_idx: Dim = -1) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, ...) -> Tensor"""
    del padding_idx  # only gradients look at it
    return gather(b, _table(b, weight), indices, 0)


def _table(b: NnefBuilder, weight: Value) -> Value:
    """Return the embedding table, as a constant of its own when a matrix product reads the same tensor.

    tract packs the weight of a product once, at load, but re-packs it at every run when anything else reads that very
    constant: a 16 x slower LM head (docs/contributing/engine-facts.md#tied-embeddings). Folding the table out and
    back costs nothing in the archive and gives the gather its own constant.
    """
    label = b.label_of(weight)
    columns = weight.shape[-1]
    if label not in b.shared_parameters or weight.rank != 2 or not isinstance(columns, int) or columns % 2:
        return weight
    return b.reshape(b.reshape(weight, [weight.shape[0], 2, columns // 2]), weight.shape)


@translates(aten.index_select.default)
def index_select(b: NnefBuilder, self: Value, dim: int, index: Value) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if self.rank == 0:
        return self
    picked = b.unsqueeze(index, [0]) if index.rank == 0 else index
    return gather(b, self, picked, axis_of(dim, self.rank))


@translates(aten.gather.default)
def gather_along(b: NnefBuilder, self: Value, dim: int, index: Value) -> Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    if self.rank == 0:
        return b.broadcast(b.unsqueeze(self, [0]), index.shape) if index.rank else self
    places = b.unsqueeze(index, [0]) if index.rank == 0 else index
    picked = gather_elements(b, self, places, axis_of(dim, self.rank))
    return b.squeeze(picked, [0]) if index.rank == 0 else picked


@translates(aten.take.default)
def take(b: NnefBuilder, self: Value, index: Value) -> Value:
    """take(Tensor self, Tensor index) -> Tensor"""
    return gather(b, b.reshape(self, [volume(self.shape)]), index, 0)


@translates(aten.take_along_dim.default)
def take_along_dim(b: NnefBuilder, self: Value, indices: Value, dim: int | None = None) -> Value:
    """take_along_dim(Tensor self, Tensor indices, int? dim=None) -> Tensor"""
    if dim is None:
        flat = b.reshape(self, [volume(self.shape)])
        return gather(b, flat, b.reshape(indices, [volume(indices.shape)]), 0)
    axis = axis_of(dim, self.rank)
    common = list(broadcast_shape(_without(self.shape, axis), _without(indices.shape, axis)))
    source = b.broadcast(self, [*common[:axis], self.shape[axis], *common[axis:]])
    places = b.broadcast(indices, [*common[:axis], indices.shape[axis], *common[axis:]])
    return gather_elements(b, source, places, axis)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


# --- several index tensors -----------------------------------------------------------------------


@translates(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(b: NnefBuilder, self: Value, indices: Sequence[Value | None]) -> Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    given = index_tensors(b, indices)
    if not given:
        return self
    axes = list(given)
    if len(axes) == 1:
        return gather(b, self, given[axes[0]], axes[0])
    # The indexed axes become one, and the index tensors one number in it.
    beside = are_neighbours(axes)
    source = self if beside else b.transpose(self, indexed_first(axes, self.rank))
    start = axes[0] if beside else 0
    end = start + len(axes)
    place: Value | None = None
    for axis, index in given.items():
        wrapped = wrap(b, index, self.shape[axis])
        size = b.scalar(self.shape[axis], torch.int64)
        place = wrapped if place is None else b.binary("add", b.binary("mul", place, size), wrapped)
    merged = [*source.shape[:start], volume(source.shape[start:end]), *source.shape[end:]]
    assert place is not None
    return gather(b, b.reshape(source, merged), place, start)


def index_tensors(b: NnefBuilder, indices: Sequence[Value | None]) -> dict[int, Value]:
    """Return the index tensor of each indexed axis, as i64.

    Raises:
        TranslationError: one is a mask, whose count of true elements would be a size of the result.
    """
    given = {axis: index for axis, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise TranslationError(
            "indexing with a mask: the size of the result depends on the data, which NNEF cannot express.",
            "Use torch.where, masked_fill, or an index tensor.",
        )
    return {axis: b.cast(index, torch.int64) for axis, index in given.items()}


def are_neighbours(axes: Sequence[int]) -> bool:
    """Say whether the indexed axes follow each other; otherwise PyTorch puts the index's own axes first."""
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def indexed_first(axes: Sequence[int], rank: int) -> list[int]:
    """Return the permutation that brings the indexed axes to the front."""
    return [*axes, *(axis for axis in range(rank) if axis not in axes)]


def wrap(b: NnefBuilder, index: Value, size: Dim) -> Value:
    """Count negative indices from the end: outside, tract aborts (docs/contributing/engine-facts.md#what-aborts-the-process)."""
    zero = b.scalar(0, torch.int64)
    behind = b.binary("add", index, b.scalar(size, torch.int64))
    return b.select(b.binary("lt", index, zero, dtype=torch.bool), behind, index)


# --- ranges and fills ----------------------------------------------------------------------------


def positions(b: NnefBuilder, size: Dim, axis: int = 0, rank: int = 1) -> Value:
    """Return 0 .. size-1 along one axis of a tensor of the given rank (i64), the other axes being 1."""
    return b.unsqueeze(arange(b, 0, size), [other for other in range(rank) if other != axis])


def _fractional_range(b: NnefBuilder, bounds: Sequence[Dim | float], dtype: torch.dtype) -> Value:
    """Count in integers, then scale in f64: tract's own float range adds the step again and again."""
    if any(isinstance(bound, sympy.Expr) for bound in bounds):
        raise TranslationError("arange with float bounds and a dynamic size has no NNEF form.")
    start, end, step = (float(bound) for bound in bounds)  # type: ignore[arg-type]
    count = positions(b, max(math.ceil((end - start) / step), 0))
    if not dtype.is_floating_point:
        start, step = float(int(start)), float(int(step))
    scaled = b.binary("mul", b.cast(count, torch.float64), b.scalar(step, torch.float64))
    return b.cast(b.binary("add", scaled, b.scalar(start, torch.float64)), dtype)


@variant(aten.arange.default, start=0, step=1)
@variant(aten.arange.start, step=1)
@translates(aten.arange.start_step)
def arange(b: NnefBuilder, start: Dim, end: Dim, step: Dim = 1, *, dtype: torch.dtype | None = None) -> Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, ...) -> Tensor"""
    bounds = (start, end, step)
    if any(isinstance(bound, float) for bound in bounds):
        dtype = dtype or torch.get_default_dtype()
        start, end, step = bounds = _counted(start), _counted(end), _counted(step)
    if any(isinstance(bound, float) for bound in bounds):
        return _fractional_range(b, bounds, dtype or torch.get_default_dtype())
    if not isinstance(step, int) or step == 0:
        raise TranslationError(f"arange with the step {step!r} has no NNEF form: its length is not a size.")
    span = sympy.sympify(end) - sympy.sympify(start) if step > 0 else sympy.sympify(start) - sympy.sympify(end)
    length = floor_div(simplify_dim(span + abs(step) - 1), abs(step))
    # docs/contributing/engine-facts.md#operators-of-tract_core: dimension arguments give an i64 tensor of exact
    # symbolic length.
    literals: list[Argument] = [DimLiteral(dim_text(bound)) for bound in bounds]
    value = b.emit("tract_core_range", literals, shape=[length], dtype=torch.int64)
    if not isinstance(length, int):
        value = b.opaque(value, start if step > 0 else -1)
    return b.cast(value, dtype or torch.int64)


def _counted(bound: Dim | float) -> Dim:
    """Return a whole number as such: XLNet counts positions down by -1.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


@translates(aten.full.default)
def full(b: NnefBuilder, size: Sequence[Dim], fill_value: Scalar, *, dtype: torch.dtype | None = None) -> Value:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    inferred = torch.full((), fill_value).dtype if not isinstance(fill_value, sympy.Expr) else torch.int64
    return _filled(b, tuple(size), fill_value, dtype or inferred)


def _filled(b: NnefBuilder, shape: Sequence[Dim], value: Scalar | complex, dtype: torch.dtype) -> Value:
    if dtype not in COMPONENT_DTYPES:
        return b.full(tuple(shape), value, dtype)  # type: ignore[arg-type]
    number, component = complex(value), COMPONENT_DTYPES[dtype]
    # Pairs, as every complex tensor is carried (see complex_layout).
    parts = [b.full((*shape, 1), part, component) for part in (number.real, number.imag)]
    return as_complex(b.concat([b.materialised(part) for part in parts], len(shape)))


@variant(aten.full_like.default, size=None)
@variant(aten.new_ones.default, fill_value=1)
@variant(aten.new_zeros.default, fill_value=0)
@variant(aten.new_empty.default, fill_value=0)
@translates(aten.new_full.default)
def new_full(
    b: NnefBuilder, self: Value, size: Sequence[Dim] | None, fill_value: Scalar, *, dtype: torch.dtype | None = None
) -> Value:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return _filled(b, self.shape if size is None else tuple(size), fill_value, dtype or self.dtype)


@variant(aten.ones.default, fill_value=1)
@variant(aten.zeros.default, fill_value=0)
@variant(aten.empty.memory_format, fill_value=0)
def ones(b: NnefBuilder, size: Sequence[Dim], *, dtype: torch.dtype | None = None, fill_value: Scalar) -> Value:
    """ones(SymInt[] size, *, ScalarType? dtype=None, ...) -> Tensor; what `empty` holds is anybody's guess, here zeros"""
    return _filled(b, tuple(size), fill_value, dtype or torch.get_default_dtype())


@translates(aten.empty_permuted.default)
def empty_permuted(
    b: NnefBuilder, size: Sequence[Dim], physical_layout: Sequence[int], *, dtype: torch.dtype | None = None
) -> Value:
    """empty_permuted(SymInt[] size, int[] physical_layout, *, ScalarType? dtype=None, ...) -> Tensor: zeros, see `ones`"""
    del physical_layout
    return ones(b, size, dtype=dtype, fill_value=0)


@translates(aten.empty_strided.default)
def empty_strided(
    b: NnefBuilder, size: Sequence[Dim], stride: Sequence[Dim], *, dtype: torch.dtype | None = None
) -> Value:
    """empty_strided(SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, ...) -> Tensor: zeros, see `ones`"""
    del stride
    return ones(b, size, dtype=dtype, fill_value=0)


@translates(aten.new_empty_strided.default)
def new_empty_strided(
    b: NnefBuilder, self: Value, size: Sequence[Dim], stride: Sequence[Dim], *, dtype: torch.dtype | None = None
) -> Value:
    """new_empty_strided(Tensor self, SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, ...) -> Tensor: zeros"""
    del stride
    return new_full(b, self, size, 0, dtype=dtype)


def written_out(b: NnefBuilder, table: torch.Tensor, dtype: torch.dtype) -> Value:
    """Return a small matrix that stands in the graph's text."""
    rows = ArrayLiteral(tuple(ArrayLiteral(tuple(float(number) for number in row)) for row in table.tolist()))
    attributes = {"to": tract_dtype(dtype)}
    return b.emit("tract_core_cast", [rows], shape=tuple(table.shape), dtype=dtype, attributes=attributes)


@translates(aten.scalar_tensor.default)
def scalar_tensor(b: NnefBuilder, s: Scalar, *, dtype: torch.dtype | None = None) -> Value:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, ...) -> Tensor"""
    return b.full((), s, dtype or torch.get_default_dtype())

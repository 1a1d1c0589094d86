"""Operators that move axes and elements without computing: reshape, transpose, expand, cat, split, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, Shape, dim_text, floor_div, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value, shape_argument
from generic_export.translate.registry import translates

aten = torch.ops.aten


def axis_of(axis: int, rank: int) -> int:
    """Return an axis as a non-negative position.

    tract aborts on negative ones, or ignores them (docs/contributing/engine-facts.md#operators-of-tract_nnef).
    """
    return axis + rank if axis < 0 else axis


def volume(shape: Sequence[Dim]) -> Dim:
    """Return the number of elements of a shape."""
    total = sympy.Integer(1)
    for dim in shape:
        total = total * sympy.sympify(dim)
    return simplify_dim(total)


def _resolved(b: NnefBuilder, shape: Sequence[Dim], value: Value) -> Shape:
    """Replace the -1 of a requested shape by the size that is left for it."""
    if not any(isinstance(dim, int) and dim == -1 for dim in shape):
        return tuple(shape)
    for known_shape in b.result_shapes:  # PyTorch's own, in the form that it goes on with
        if len(known_shape) == len(shape) and all(
            want == -1 or same_dim(want, have) for want, have in zip(shape, known_shape, strict=True)
        ):
            return known_shape
    known = volume([dim for dim in shape if not (isinstance(dim, int) and dim == -1)])
    if same_dim(known, 0):
        raise TranslationError(f"shape {list(shape)} cannot be resolved: it has an axis of size 0 and a -1.")
    missing = simplify_dim(sympy.cancel(sympy.sympify(volume(value.shape)) / sympy.sympify(known)))
    return tuple(missing if isinstance(dim, int) and dim == -1 else dim for dim in shape)


@translates(aten.view.default, aten._unsafe_view.default, aten.view_copy.default)
def view(b: NnefBuilder, self: Value, size: Sequence[Dim]) -> Value:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    return b.reshape(self, _resolved(b, size, self))


@translates(aten.reshape.default)
def reshape(b: NnefBuilder, self: Value, shape: Sequence[Dim]) -> Value:
    """reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)"""
    return b.reshape(self, _resolved(b, shape, self))


@translates(aten.flatten.using_ints)
def flatten(b: NnefBuilder, self: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """flatten.using_ints(Tensor(a) self, int start_dim=0, int end_dim=-1) -> Tensor(a)"""
    if self.rank == 0:
        return b.unsqueeze(self, [0])
    start, end = axis_of(start_dim, self.rank), axis_of(end_dim, self.rank)
    return b.reshape(self, [*self.shape[:start], volume(self.shape[start : end + 1]), *self.shape[end + 1 :]])


@translates(aten.unflatten.int)
def unflatten(b: NnefBuilder, self: Value, dim: int, sizes: Sequence[Dim]) -> Value:
    """unflatten.int(Tensor(a) self, int dim, SymInt[] sizes) -> Tensor(a)"""
    axis = axis_of(dim, self.rank)
    return b.reshape(self, _resolved(b, [*self.shape[:axis], *sizes, *self.shape[axis + 1 :]], self))


@translates(aten.unsqueeze.default)
def unsqueeze(b: NnefBuilder, self: Value, dim: int) -> Value:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return b.unsqueeze(self, [axis_of(dim, self.rank + 1)])


@variant(aten.squeeze.default, dim=None)
@translates(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(b: NnefBuilder, self: Value, dim: Sequence[int] | int | None) -> Value:
    """squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)"""
    given = range(self.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = [axis_of(axis, self.rank) for axis in given]
    return b.squeeze(self, [axis for axis in axes if self.rank and same_dim(self.shape[axis], 1)])


@translates(aten.transpose.int)
def transpose(b: NnefBuilder, self: Value, dim0: int, dim1: int) -> Value:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    axes = list(range(self.rank))
    if axes:
        first, second = axis_of(dim0, self.rank), axis_of(dim1, self.rank)
        axes[first], axes[second] = axes[second], axes[first]
    return b.transpose(self, axes)


@translates(aten.t.default)
def t(b: NnefBuilder, self: Value) -> Value:
    """t(Tensor(a) self) -> Tensor(a)"""
    return b.transpose(self, list(reversed(range(self.rank))))


@translates(aten.permute.default, aten.permute_copy.default)
def permute(b: NnefBuilder, self: Value, dims: Sequence[int]) -> Value:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    return b.transpose(self, [axis_of(axis, self.rank) for axis in dims])


@translates(aten.expand.default)
def expand(b: NnefBuilder, self: Value, size: Sequence[Dim]) -> Value:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    aligned = b.align_rank(self, len(size))
    kept = [
        have if isinstance(want, int) and want == -1 else want for have, want in zip(aligned.shape, size, strict=True)
    ]
    return b.broadcast(aligned, kept)


@translates(aten.repeat.default)
def repeat(b: NnefBuilder, self: Value, repeats: Sequence[Dim]) -> Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    aligned = b.align_rank(self, len(repeats))
    if all(same_dim(count, 1) for count in repeats):
        return aligned
    shape = [simplify_dim(sympy.sympify(d) * sympy.sympify(r)) for d, r in zip(aligned.shape, repeats, strict=True)]
    if all(same_dim(count, 1) or same_dim(size, 1) for count, size in zip(repeats, aligned.shape, strict=True)):
        return b.broadcast(aligned, shape)  # tract folds the tile of a constant to a single one, whatever reads it
    return b.emit("tile", [aligned], shape=shape, dtype=self.dtype, attributes={"repeats": shape_argument(repeats)})


@translates(aten.cat.default)
def cat(b: NnefBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    # PyTorch skips the legacy empty tensor of shape [0] whatever the rank of the others.
    values = [value for value in tensors if not (value.rank == 1 and same_dim(value.shape[0], 0))]
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    return b.concat([b.cast(value, dtype) for value in values], axis_of(dim, values[0].rank))


@translates(aten.stack.default)
def stack(b: NnefBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    axis = axis_of(dim, tensors[0].rank + 1)
    return cat(b, [b.unsqueeze(value, [axis]) for value in tensors], axis)


@translates(aten.split.Tensor)
def split(b: NnefBuilder, self: Value, split_size: Dim, dim: int = 0) -> list[Value]:
    """split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"""
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    if not isinstance(size, int) or not isinstance(split_size, int):
        # As many parts as PyTorch found; it guards that number, or refuses the axis.
        return _equal_parts(b, self, axis, split_size, len(b.result_shapes))
    starts = range(0, max(size, 1), split_size) if split_size else [0]
    return [b.slice(self, axis, start, min(start + split_size, size)) for start in starts]


def _equal_parts(b: NnefBuilder, value: Value, axis: int, part: Dim, count: int) -> list[Value]:
    """Cut an axis into parts of one size, of which the last takes what is left."""
    starts = [simplify_dim(index * sympy.sympify(part)) for index in range(count)]
    ends = [*starts[1:], value.shape[axis]]
    return [b.slice(value, axis, start, end) for start, end in zip(starts, ends, strict=True)]


@translates(aten.split_with_sizes.default)
def split_with_sizes(b: NnefBuilder, self: Value, split_sizes: Sequence[Dim], dim: int = 0) -> list[Value]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    axis = axis_of(dim, self.rank)
    parts, start = [], sympy.Integer(0)
    for size in split_sizes:
        end = start + sympy.sympify(size)
        parts.append(b.slice(self, axis, simplify_dim(start), simplify_dim(end)))
        start = end
    return parts


@translates(aten.chunk.default, aten.unsafe_chunk.default)
def chunk(b: NnefBuilder, self: Value, chunks: int, dim: int = 0) -> list[Value]:
    """chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]"""
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    part = floor_div(simplify_dim(sympy.sympify(size) + chunks - 1), chunks)
    return split(b, self, part, dim) if isinstance(size, int) else _equal_parts(b, self, axis, part, chunks)


@variant(aten.hsplit.int, dim=None)
@variant(aten.vsplit.int, dim=0)
@variant(aten.dsplit.int, dim=2)
@translates(aten.tensor_split.sections)
def tensor_split(b: NnefBuilder, self: Value, sections: Dim, dim: int | None = 0) -> list[Value]:
    """tensor_split.sections(Tensor(a -> *) self, SymInt sections, int dim=0) -> Tensor(a)[]"""
    axis = min(1, self.rank - 1) if dim is None else axis_of(dim, self.rank)  # hsplit: columns, or the only axis
    size = self.shape[axis]
    if not isinstance(sections, int) or not isinstance(size, int):
        # PyTorch's own shapes assume that the size leaves the remainder that the example left.
        raise TranslationError("tensor_split of a dynamic axis into sections: use chunk, or pass the positions.")
    starts = [index * (size // sections) + min(index, size % sections) for index in range(sections + 1)]
    return [b.slice(self, axis, start, end) for start, end in pairwise(starts)]


@translates(aten.unbind.int, aten.unbind_copy.int)
def unbind(b: NnefBuilder, self: Value, dim: int = 0) -> list[Value]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    if not isinstance(size, int):
        raise TranslationError(f"unbind of a dynamic axis of size {dim_text(size)}: the number of parts must be known.")
    return [b.squeeze(b.slice(self, axis, start, start + 1), [axis]) for start in range(size)]

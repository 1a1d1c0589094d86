"""Operators on the diagonals and triangles of matrices."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch

from generic_export.compat import torch_sympy
from generic_export.errors import TranslationError
from generic_export.ops.indexing import gather, positions, written_out
from generic_export.ops.shape import axis_of, volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, plain_size, same_dim, simplify_dim, smaller_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten

_LARGEST_INDEX_LIST = 4096  # numbers written into the graph itself


@variant(aten.tril.default, upper=False)
@variant(aten.triu.default, upper=True)
def triangle(b: NnefBuilder, self: Value, diagonal: Dim = 0, *, upper: bool) -> Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    offset = diagonal if isinstance(diagonal, int) else b.scalar(diagonal, torch.int64)
    return b.emit("tract_core_trilu", [self, offset], shape=self.shape, dtype=self.dtype, attributes={"upper": upper})


@variant(aten.tril_indices.default, of_static=torch.tril_indices)
@variant(aten.triu_indices.default, of_static=torch.triu_indices)
def triangle_indices(
    b: NnefBuilder,
    row: Dim,
    col: Dim,
    offset: Dim = 0,
    *,
    dtype: torch.dtype | None = None,
    of_static: Callable[[int, int, int], torch.Tensor],
) -> Value:
    """tril_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    if not (isinstance(row, int) and isinstance(col, int) and isinstance(offset, int)):
        raise TranslationError("triangle indices of a dynamic size have no NNEF form: their count is not a size.")
    indices = of_static(row, col, offset)
    wanted = dtype or torch.int64
    if not indices.shape[1]:
        return b.full((2, 0), 0, wanted)
    if indices.numel() > _LARGEST_INDEX_LIST:
        raise TranslationError(
            f"{indices.numel()} triangle indices are too many for the text of the graph.", "Store them as a buffer."
        )
    return written_out(b, indices, wanted)


# --- diagonals -----------------------------------------------------------------------------------


def _matrix_last(rank: int, dim1: int, dim2: int) -> list[int]:
    first, second = axis_of(dim1, rank), axis_of(dim2, rank)
    return [*(axis for axis in range(rank) if axis not in (first, second)), first, second]


@translates(aten.diagonal.default)
def diagonal(b: NnefBuilder, self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    value = b.transpose(self, _matrix_last(self.rank, dim1, dim2))
    batch, (rows, columns) = value.shape[:-2], value.shape[-2:]
    length = _diagonal_length(rows, columns, offset)
    if same_dim(length, 0):
        return b.full((*batch, 0), 0, self.dtype)
    step = simplify_dim(sympy.sympify(columns) + 1)
    first = offset if offset >= 0 else simplify_dim(-offset * sympy.sympify(columns))
    places = b.binary("mul", positions(b, length), b.scalar(step, torch.int64))
    flat = b.reshape(value, [*batch, volume((rows, columns))])
    return gather(b, flat, b.binary("add", places, b.scalar(first, torch.int64)), len(batch))


def _diagonal_length(rows: Dim, columns: Dim, offset: int) -> Dim:
    below = simplify_dim(sympy.sympify(rows) + min(offset, 0))
    right = simplify_dim(sympy.sympify(columns) - max(offset, 0))
    length = smaller_dim(below, right)
    return max(length, 0) if isinstance(length, int) else simplify_dim(plain_size(torch_sympy.Max(length, 0)))


@translates(aten.diag_embed.default)
def diag_embed(b: NnefBuilder, self: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    rank = self.rank + 1
    size = simplify_dim(sympy.sympify(self.shape[-1]) + abs(offset))
    value = _on_diagonal(b, self, size, size, offset)
    zero = b.scalar(0, self.dtype)
    matrix = b.select(_diagonal_mask(b, size, size, offset, rank), value, zero)
    order = _matrix_last(rank, dim1, dim2)
    return b.transpose(matrix, [order.index(axis) for axis in range(rank)])


def _on_diagonal(b: NnefBuilder, values: Value, rows: Dim, columns: Dim, offset: int) -> Value:
    """Repeat the values of a diagonal over the matrix, each along the row (or column) that it lies in."""
    last = b.scalar(simplify_dim(sympy.sympify(values.shape[-1]) - 1), torch.int64)
    places = b.binary("min", positions(b, rows if offset >= 0 else columns), last)
    spread = gather(b, values, places, values.rank - 1)
    return b.unsqueeze(spread, [values.rank if offset >= 0 else values.rank - 1])


def _diagonal_mask(b: NnefBuilder, rows: Dim, columns: Dim, offset: int, rank: int) -> Value:
    across, down = positions(b, columns, rank - 1, rank), positions(b, rows, rank - 2, rank)
    if offset:
        down = b.binary("add", down, b.scalar(offset, torch.int64))
    return b.binary("eq", across, down, dtype=torch.bool)


@translates(aten.diagonal_scatter.default)
def diagonal_scatter(b: NnefBuilder, self: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    if same_dim(src.shape[-1], 0):
        return self
    order = _matrix_last(self.rank, dim1, dim2)
    value = b.transpose(self, order)
    rows, columns = value.shape[-2:]
    new = _on_diagonal(b, b.cast(src, self.dtype), rows, columns, offset)
    written = b.select(_diagonal_mask(b, rows, columns, offset, self.rank), new, value)
    return b.transpose(written, [order.index(axis) for axis in range(self.rank)])

"""Operators on the diagonals and triangles of matrices."""

from __future__ import annotations

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral
from generic_export.ops.indexing import gather, positions
from generic_export.ops.shape import axis_of, volume
from generic_export.torch_graph.dims import Dim, same_dim, simplify_dim, smaller_dim
from generic_export.translate.builder import NnefBuilder, Value, tract_dtype
from generic_export.translate.registry import translates

aten = torch.ops.aten

_LARGEST_INDEX_LIST = 4096  # numbers written into the graph itself


@translates(aten.tril.default)
def tril(b: NnefBuilder, self: Value, diagonal: Dim = 0) -> Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return _triangle(b, self, diagonal, upper=False)


@translates(aten.triu.default)
def triu(b: NnefBuilder, self: Value, diagonal: Dim = 0) -> Value:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return _triangle(b, self, diagonal, upper=True)


def _triangle(b: NnefBuilder, value: Value, diagonal: Dim, *, upper: bool) -> Value:
    offset = diagonal if isinstance(diagonal, int) else b.scalar(diagonal, torch.int64)
    attributes: dict[str, Argument] = {"upper": upper}
    return b.emit("tract_core_trilu", [value, offset], shape=value.shape, dtype=value.dtype, attributes=attributes)


@translates(aten.tril_indices.default)
def tril_indices(b: NnefBuilder, row: Dim, col: Dim, offset: Dim = 0, *, dtype: torch.dtype | None = None) -> Value:
    """tril_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    return _index_list(b, torch.tril_indices, row, col, offset, dtype)


@translates(aten.triu_indices.default)
def triu_indices(b: NnefBuilder, row: Dim, col: Dim, offset: Dim = 0, *, dtype: torch.dtype | None = None) -> Value:
    """triu_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    return _index_list(b, torch.triu_indices, row, col, offset, dtype)


def _index_list(b: NnefBuilder, function: object, row: Dim, col: Dim, offset: Dim, dtype: torch.dtype | None) -> Value:
    if not (isinstance(row, int) and isinstance(col, int) and isinstance(offset, int)):
        raise TranslationError("the indices of a triangle of dynamic size have no NNEF form: their count is no size.")
    indices: torch.Tensor = function(row, col, offset)  # type: ignore[operator]
    wanted = dtype or torch.int64
    if not indices.shape[1]:
        return b.full((2, 0), 0, wanted)
    if indices.numel() > _LARGEST_INDEX_LIST:
        raise TranslationError(
            f"{indices.numel()} triangle indices are too many for the graph's text.", "Store them as a buffer."
        )
    literal = ArrayLiteral(tuple(ArrayLiteral(tuple(float(index) for index in line)) for line in indices.tolist()))
    attributes: dict[str, Argument] = {"to": tract_dtype(wanted)}
    return b.emit("tract_core_cast", [literal], shape=tuple(indices.shape), dtype=wanted, attributes=attributes)


# --- diagonals -----------------------------------------------------------------------------------


def _matrix_last(value: Value, dim1: int, dim2: int) -> list[int]:
    first, second = axis_of(dim1, value.rank), axis_of(dim2, value.rank)
    return [*(axis for axis in range(value.rank) if axis not in (first, second)), first, second]


@translates(aten.diagonal.default)
def diagonal(b: NnefBuilder, self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    value = b.transpose(self, _matrix_last(self, dim1, dim2))
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
    return max(length, 0) if isinstance(length, int) else length


@translates(aten.diag_embed.default)
def diag_embed(b: NnefBuilder, self: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """diag_embed(Tensor self, int offset=0, int dim1=-2, int dim2=-1) -> Tensor"""
    rank = self.rank + 1
    first, second = axis_of(dim1, rank), axis_of(dim2, rank)
    size = simplify_dim(sympy.sympify(self.shape[-1]) + abs(offset))
    value = _on_diagonal(b, self, size, size, offset)
    zero = b.scalar(0, self.dtype)
    matrix = b.select(_diagonal_mask(b, size, size, offset, rank), value, zero)
    order = [*(axis for axis in range(rank) if axis not in (first, second)), first, second]
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
    order = _matrix_last(self, dim1, dim2)
    value = b.transpose(self, order)
    rows, columns = value.shape[-2:]
    new = _on_diagonal(b, b.cast(src, self.dtype), rows, columns, offset)
    written = b.select(_diagonal_mask(b, rows, columns, offset, self.rank), new, value)
    return b.transpose(written, [order.index(axis) for axis in range(self.rank)])

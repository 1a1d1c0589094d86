"""Small dense matrices of known size, by Gaussian elimination with pivots, unrolled: determinant, inverse, solution.

Each column costs a dozen operations, so that sizes are limited; everything is computed in f64.
"""

# ruff: noqa: N803  (the schemas' own parameter names)

from __future__ import annotations

import torch

from generic_export.errors import TranslationError
from generic_export.ops.special import back_to, in_double
from generic_export.torch_graph.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor

_LARGEST = 16


def _size(matrix: Tensor) -> int:
    size = matrix.shape[-1]
    if not isinstance(size, int) or size > _LARGEST:
        raise TranslationError(f"elimination in a matrix of {size} columns: tract has no such operation, and at most"
                               f" {_LARGEST} columns are unrolled.")  # fmt: skip
    return size


def _eliminated(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the determinant, and the right side after the matrix has become the identity."""
    size = _size(matrix)
    rows = torch.arange(size)
    work = torch.cat([in_double(matrix), in_double(right)], dim=-1)
    determinant = torch.ones(matrix.shape[:-2], dtype=torch.float64)
    for column in range(size):
        candidates = torch.where(rows < column, -1.0, work[..., column].abs())
        pivot = candidates.argmax(-1, keepdim=True)
        is_pivot, is_target = (rows == pivot).to(torch.float64), (rows == column).to(torch.float64)
        pivot_row = (work * is_pivot.unsqueeze(-1)).sum(-2)
        difference = (pivot_row - work[..., column, :]).unsqueeze(-2)
        work = work + (is_target - is_pivot).unsqueeze(-1) * difference
        head = pivot_row[..., column]
        moved = (pivot != column).squeeze(-1)
        determinant = determinant * torch.where(moved, -head, head)
        scaled = (pivot_row / torch.where(head == 0, 1.0, head).unsqueeze(-1)).unsqueeze(-2)
        factors = torch.where(rows == column, 0.0, work[..., column]).unsqueeze(-1)
        cleared = work - factors * scaled
        work = torch.where((rows == column).unsqueeze(-1), scaled, cleared)
    return determinant, work[..., size:]


def _determinant(matrix: Tensor) -> Tensor:
    return _eliminated(matrix, matrix[..., :0])[0]


@rewrites(aten.linalg_det.default, aten.det.default)
def det(A: Tensor) -> Tensor:
    """The determinant."""
    return back_to(_determinant(A), A)


@rewrites(aten.linalg_slogdet.default, aten.slogdet.default)
def slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    """Sign and logarithm of the determinant."""
    determinant = _determinant(A)
    return back_to(torch.sign(determinant), A), back_to(torch.log(determinant.abs()), A)


@rewrites(aten.logdet.default)
def logdet(self: Tensor) -> Tensor:
    """The logarithm of the determinant."""
    return back_to(torch.log(_determinant(self)), self)


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solution; NaN where the matrix is singular, which PyTorch answers with an exception."""
    determinant, solution = _eliminated(matrix, right)
    return back_to(torch.where((determinant == 0)[..., None, None], torch.nan, solution), matrix)


# linalg.inv_ex and linalg.cholesky_ex stay without a form: what `info` says depends on LAPACK's own rounding.
@rewrites(aten.linalg_inv.default, aten.inverse.default)
def inv(A: Tensor) -> Tensor:
    """The inverse."""
    return _solved(A, torch.eye(_size(A), dtype=torch.float64).expand(A.shape))


@rewrites(aten.linalg_matrix_exp.default, aten.matrix_exp.default)
def matrix_exp(self: Tensor) -> Tensor:
    """exp of a matrix: Taylor's series of A / 2^10, squared ten times."""
    scaled = in_double(self) * 2.0**-10
    term = torch.eye(_size(self), dtype=torch.float64).expand(self.shape)
    result = term
    for order in range(1, 11):
        term = term @ scaled * (1.0 / order)
        result = result + term
    for _ in range(10):
        result = result @ result
    return back_to(result, self)


@rewrites(aten.linalg_solve.default)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """X with A X = B (X A = B when `left` is false); B may be a vector."""
    if not left:
        return solve(A.mT, B.mT).mT
    is_vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    columns = B.unsqueeze(-1) if is_vector else B
    batch = torch.broadcast_shapes(A.shape[:-2], columns.shape[:-2])
    wide = A.expand(*batch, *A.shape[-2:]), columns.expand(*batch, *columns.shape[-2:])
    solution = _solved(*wide)
    return solution.squeeze(-1) if is_vector else solution


@rewrites(aten.linalg_cholesky.default, aten.cholesky.default)
def cholesky(self: Tensor, upper: bool = False) -> Tensor:
    """L with L L^T = A (or its transpose)."""
    matrix, rows = in_double(self), torch.arange(_size(self))
    columns: list[Tensor] = []
    for index in range(_size(self)):
        rest = matrix[..., index]
        for column in columns:
            rest = rest - column * column[..., index : index + 1]
        scaled = rest / torch.sqrt(rest[..., index : index + 1])
        columns.append(torch.where(rows >= index, scaled, 0.0))
    lower = back_to(torch.stack(columns, dim=-1), self) if columns else self
    return lower.mT if upper else lower

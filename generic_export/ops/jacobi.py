"""Singular values and symmetric eigenvalues of matrices of known size, by Jacobi's rotations (Hestenes' one-sided form), in f64.

Columns are made orthogonal in pairs, half of them at once; after each round they change partners as in a round-robin tournament.
One step of a loop is one round. Vectors have signs of their own, as LAPACK's have: neither says which.
"""

# ruff: noqa: N803  (the schemas' own parameter names)

from __future__ import annotations

import torch

from generic_export.ops.householder import reflected, reflections
from generic_export.ops.matrix import identity_like, known_size
from generic_export.ops.special import back_to, in_double
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.loops import loop

aten = torch.ops.aten
Tensor = torch.Tensor

_SWEEPS = (
    12  # of all pairs; convergence is quadratic, and ten are enough for hundreds of columns (Golub & Van Loan, 8.6.3)
)


def orthogonal_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return W and an orthogonal V with A V = W, the columns of W orthogonal to each other.

    Args:
        matrix: [.., m, n] in f64.
    """
    rows, count = known_size(matrix, -2), known_size(matrix)
    both = torch.cat([matrix, identity_like(matrix, count, count)], dim=-2)
    if count % 2:  # a partner for the last column, which nothing is rotated into
        both = torch.cat([both, torch.zeros_like(both[..., :1])], dim=-1)
    half = (count + 1) // 2

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (columns,), (nothing,) = states, slices
        left, right = columns[..., :half] + nothing, columns[..., half:]
        cosine, sine = _rotation(left[..., :rows, :], right[..., :rows, :])
        return [_next_partners(cosine * left - sine * right, sine * left + cosine * right)], []

    rounds = torch.zeros(_SWEEPS * max(2 * half - 1, 0) if count > 1 else 0, dtype=torch.float64)
    (both,), _ = loop(step, [both], [rounds])
    return both[..., :rows, :count], both[..., rows:, :count]


def _rotation(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of what makes each column of one side orthogonal to its partner."""
    product = (left * right).sum(-2, keepdim=True)
    difference = (right * right).sum(-2, keepdim=True) - (left * left).sum(-2, keepdim=True)
    idle = product == 0
    slope = difference / torch.where(idle, 1.0, 2.0 * product)
    tangent = torch.where(slope < 0, -1.0, 1.0) / (slope.abs() + torch.sqrt(1.0 + slope * slope))
    tangent = torch.where(idle, 0.0, tangent)
    cosine = torch.rsqrt(1.0 + tangent * tangent)
    return cosine, cosine * tangent


def _next_partners(left: Tensor, right: Tensor) -> Tensor:
    """The first column keeps its place; all others move on by one, round the table."""
    left = torch.cat([left[..., :1], right[..., :1], left[..., 1:]], dim=-1)
    right = torch.cat([right[..., 1:], left[..., -1:]], dim=-1)
    return torch.cat([left[..., :-1], right], dim=-1)


def _in_order(columns: Tensor, order: Tensor) -> Tensor:
    return torch.gather(columns, -1, order.unsqueeze(-2).expand(columns.shape))


@rewrites(aten._linalg_svd.default)
def svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^T (U and V^T are empty without `compute_uv`)."""
    rows, columns = known_size(A, -2), known_size(A)
    if rows < columns:
        left, values, right = svd(A.mT, full_matrices, compute_uv)
        return (right.mT, values, left.mT) if compute_uv else (right, values, left)
    images, vectors = orthogonal_columns(in_double(A))
    norms = torch.sqrt((images * images).sum(-2))
    values, order = torch.sort(norms, dim=-1, descending=True, stable=True)
    if not compute_uv:
        nothing = torch.zeros(0, dtype=A.dtype)
        return nothing, back_to(values, A), nothing
    directions = _in_order(images, order) / torch.where(values == 0, 1.0, values).unsqueeze(-2)
    left = _completed(directions, rows if full_matrices else columns)
    return back_to(left, A), back_to(values, A), back_to(_in_order(vectors, order).mT, A)


def _completed(directions: Tensor, count: int) -> Tensor:
    """Return orthonormal columns that begin with those given; columns of zeros, and what lacks, are chosen freely."""
    upper, vectors, factors = reflections(directions)
    basis = reflected(vectors, factors, identity_like(directions, known_size(directions, -2), count))
    signs = torch.where(torch.diagonal(upper, dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    known = known_size(directions)
    return torch.cat([basis[..., :known] * signs, basis[..., known:]], dim=-1)


@rewrites(aten._linalg_eigh.default)
def eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues in rising order and eigenvectors of a symmetric matrix, of which one triangle is read."""
    size = known_size(A)
    matrix = in_double(A)
    half = torch.tril(matrix) if UPLO.upper() == "L" else torch.triu(matrix).mT
    symmetric = half + torch.tril(half, -1).mT
    # Eigenvalues of one size and two signs are one singular value: a shift by their bound makes all of them positive.
    bound = torch.sqrt((symmetric * symmetric).sum((-2, -1), keepdim=True))
    _, vectors = orthogonal_columns(symmetric + bound * torch.eye(size, dtype=torch.float64))
    values, order = torch.sort((vectors * (symmetric @ vectors)).sum(-2), dim=-1, stable=True)
    wanted = back_to(_in_order(vectors, order), A) if compute_v else torch.zeros(0, dtype=A.dtype)
    return back_to(values, A), wanted


def polar(A: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal columns U and a symmetric positive semidefinite H of A = U H; of A = L S R^T, U = L R^T and H = R S R^T."""
    left, values, across = svd(in_double(A))
    return back_to(left @ across, A), back_to(across.mT @ (values.unsqueeze(-1) * across), A)


if hasattr(aten, "linalg_polar"):  # since PyTorch 2.15
    rewrites(aten.linalg_polar.default)(polar)


@rewrites(aten.linalg_pinv.atol_rtol_tensor)
def pinv(self: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False) -> Tensor:
    """The pseudoinverse: singular values below both tolerances count as zero."""
    if hermitian:
        values, right = eigh(in_double(self))
        left, sizes = right, values.abs()
    else:
        left, values, across = svd(in_double(self))
        right, sizes = across.mT, values
    if not sizes.shape[-1]:
        return self.mT.clone()
    largest = sizes.amax(-1, keepdim=True)
    absolute = torch.zeros((), dtype=torch.float64) if atol is None else in_double(atol)
    if rtol is None:
        precision = max(self.shape[-2:]) * torch.finfo(self.dtype).eps
        relative = torch.where(absolute > 0, 0.0, precision)
    else:
        relative = in_double(rtol)
    limit = torch.maximum(absolute.unsqueeze(-1), relative.unsqueeze(-1) * largest)
    kept = sizes > limit
    inverses = torch.where(kept, 1.0 / torch.where(kept, values, 1.0), 0.0)
    return back_to((right * inverses.unsqueeze(-2)) @ left.mT, self)

"""Dense matrices of known size: LU, Cholesky, and what follows from them, one column of a matrix a step of a loop, in f64.

As LAPACK has them: rows change places for the largest pivot, the first of equals; `info` is the first column (from 1) whose pivot
does not allow to go on. A singular matrix, which PyTorch answers with an exception, has NaN for an inverse.
"""

# ruff: noqa: N803  (the schemas' own parameter names)

from __future__ import annotations

import math

import torch

from generic_export.compat import present_operators
from generic_export.errors import TranslationError
from generic_export.ops.special import back_to, in_double
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.loops import loop

aten = torch.ops.aten
Tensor = torch.Tensor


def known_size(matrix: Tensor, axis: int = -1) -> int:
    """Return a size of a matrix, which steps are counted by.

    Raises:
        TranslationError: it is dynamic.
    """
    size = matrix.shape[axis]
    if not isinstance(size, int):
        raise TranslationError(f"factorization of a matrix with a dynamic size ({size}) has no NNEF form.",
                               "Its last two axes must be static.")  # fmt: skip
    return size


def columns_first(matrix: Tensor) -> Tensor:
    """Return the columns along axis 0, as loops read them."""
    return torch.movedim(matrix, -1, 0)


def columns_last(columns: Tensor) -> Tensor:
    """Return what loops collect along axis 0 as columns of a matrix."""
    return torch.movedim(columns, 0, -1)


def identity_like(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return an identity in f64 for every matrix of a batch."""
    return torch.eye(rows, columns, dtype=torch.float64).expand(*matrix.shape[:-2], rows, columns)


def places(steps: int, size: int) -> tuple[Tensor, Tensor]:
    """Return, for each step, where its own place is among `size`, and the places after it: two masks [steps, size]."""
    step, place = torch.arange(steps).unsqueeze(-1), torch.arange(size)
    return place == step, place > step


def at(mask: Tensor, values: Tensor, axis: int) -> Tensor:
    """Return the values where a mask of one place is set, without their axis."""
    return torch.where(mask, values, 0.0).sum(axis)


# --- LU --------------------------------------------------------------------------------------------


def factor_lu(matrix: Tensor, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return LU in one matrix, the pivots (from 1), the rows' order and `info`: `linalg.lu_factor_ex`, and what P is made of."""
    row_count, column_count = known_size(matrix, -2), known_size(matrix)

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (work, order, info), (number, here, below, this_column, columns_after) = states, slices
        column = at(this_column, work, -1)
        above = ~(here | below)
        chosen = torch.where(above if pivot else ~here, -1.0, column.abs()).argmax(-1, keepdim=True)
        there = (torch.arange(row_count) == chosen).unsqueeze(-1)
        rows = torch.cat([work, order.unsqueeze(-1)], dim=-1)
        rows = _swapped(here.unsqueeze(-1), there, rows)
        work, order = rows[..., :-1], rows[..., -1]
        column = at(this_column, work, -1)
        head = at(here, column, -1).unsqueeze(-1)
        factors = torch.where(below, column / torch.where(head == 0, 1.0, head), 0.0).unsqueeze(-1)
        row = torch.where(columns_after, at(here.unsqueeze(-1), work, -2), 0.0).unsqueeze(-2)
        work = torch.where(below.unsqueeze(-1) & this_column, factors, work - factors * row)
        stopped = (head.squeeze(-1) == 0) & (info == 0)
        return [work, order, torch.where(stopped, number, info)], [chosen.squeeze(-1) + 1]

    work = in_double(matrix)
    order = torch.arange(row_count, dtype=torch.float64).expand(work.shape[:-1])
    steps = min(row_count, column_count)
    sequences = [torch.arange(1, steps + 1), *places(steps, row_count), *places(steps, column_count)]
    none = torch.zeros((0, *work.shape[:-2]), dtype=torch.int64)
    (work, order, info), (pivots,) = loop(step, [work, order, _no_info(work)], sequences, without_steps=[none])
    return work, columns_last(pivots), order, info


def _swapped(here: Tensor, there: Tensor, rows: Tensor) -> Tensor:
    """Exchange two rows."""
    first, second = at(here, rows, -2).unsqueeze(-2), at(there, rows, -2).unsqueeze(-2)
    return torch.where(here, second, torch.where(there, first, rows))


def _no_info(matrix: Tensor) -> Tensor:
    return torch.zeros(matrix.shape[:-2], dtype=torch.int64)


def _permutation(order: Tensor) -> Tensor:
    """Return P with A = P L U."""
    return (torch.arange(order.shape[-1]).unsqueeze(-1) == order.unsqueeze(-2)).to(torch.float64)


def _lower_of(work: Tensor) -> Tensor:
    rows, columns = work.shape[-2:]
    size = min(rows, columns)
    return torch.tril(work[..., :size], -1) + torch.eye(rows, size, dtype=torch.float64)


def _upper_of(work: Tensor) -> Tensor:
    return torch.triu(work[..., : min(work.shape[-2:]), :])


@rewrites(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(A: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """L and U in one matrix, pivots, info."""
    work, pivots, _, info = factor_lu(A, pivot)
    return back_to(work, A), pivots.to(torch.int32), info.to(torch.int32)


# PyTorch's own decompositions of this one and of tensorinv look at `info`, which puts tokens of an effect into the graph.
@rewrites(aten.linalg_lu_factor.default)
def lu_factor(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    """L and U in one matrix, and pivots."""
    work, pivots, _ = lu_factor_ex(A, pivot=pivot)
    return work, pivots


@rewrites(aten.linalg_lu.default)
def lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """P, L and U (P is empty without pivots)."""
    work, _, order, _ = factor_lu(A, pivot)
    permutation = _permutation(order) if pivot else torch.zeros(0, dtype=torch.float64)
    return back_to(permutation, A), back_to(_lower_of(work), A), back_to(_upper_of(work), A)


@rewrites(aten.lu_unpack.default)
def lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """P, L and U of a factorisation; empty ones of what is not asked for."""
    nothing = torch.zeros(0, dtype=LU_data.dtype)
    permutation, lower, upper = nothing, nothing, nothing
    if unpack_pivots:
        start = torch.arange(known_size(LU_data, -2), dtype=torch.float64).expand(LU_data.shape[:-1]).unsqueeze(-1)
        permutation = back_to(_permutation(_with_swaps(start, LU_pivots).squeeze(-1)), LU_data)
    if unpack_data:
        work = in_double(LU_data)
        lower, upper = back_to(_lower_of(work), LU_data), back_to(_upper_of(work), LU_data)
    return permutation, lower, upper


def _with_swaps(rows: Tensor, pivots: Tensor, *, undone: bool = False) -> Tensor:
    """Exchange rows as pivots say, in their order, or back."""
    count = known_size(rows, -2)

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (moved,), (here, there) = states, slices
        return [_swapped(here.unsqueeze(-1), there.unsqueeze(-1), moved)], []

    targets = torch.arange(1, count + 1) == columns_first(pivots).unsqueeze(-1)
    sequences = [places(known_size(pivots), count)[0], targets]
    (moved,), _ = loop(step, [rows], [torch.flip(each, [0]) for each in sequences] if undone else sequences)
    return moved


# --- triangles -------------------------------------------------------------------------------------


def substituted(matrix: Tensor, right: Tensor, *, upper: bool, unit: bool = False) -> Tensor:
    """Return the solution of a triangular system: the other triangle is not read, nor the diagonal of a `unit` one."""
    size = known_size(matrix)

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (rest,), (here, open_rows, column) = states, slices
        value = at(here.unsqueeze(-1), rest, -2)
        if not unit:
            value = value / at(here, column, -1).unsqueeze(-1)
        left = torch.where(open_rows, column, 0.0)
        rest = rest - left.unsqueeze(-1) * value.unsqueeze(-2)
        return [torch.where(here.unsqueeze(-1), value.unsqueeze(-2), rest)], []

    here, after = places(size, size)
    sequences = [here, ~(here | after) if upper else after, columns_first(matrix)]
    (solution,), _ = loop(step, [right], [torch.flip(each, [0]) for each in sequences] if upper else sequences)
    return solution


def _batched(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in f64, in batches of one shape."""
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    return tuple(in_double(each).expand(*batch, *each.shape[-2:]) for each in (matrix, right))  # type: ignore[return-value]


@rewrites(aten.linalg_solve_triangular.default)
def solve_triangular(self: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """X with A X = B (X A = B when `left` is false), A a triangle."""
    if not left:
        return solve_triangular(self.mT, B.mT, upper=not upper, unitriangular=unitriangular).mT
    return back_to(substituted(*_batched(self, B), upper=upper, unit=unitriangular), B)


@rewrites(aten.triangular_solve.default)
def triangular_solve(
    self: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """X with A X = b (or with A's transpose), and A."""
    matrix, right = _batched(A, self)
    if transpose:
        matrix, upper = matrix.mT, not upper
    solution = substituted(matrix, right, upper=upper, unit=unitriangular)
    return back_to(solution, self), A.expand(*solution.shape[:-2], *A.shape[-2:]).clone()


@rewrites(aten.cholesky_solve.default)
def cholesky_solve(self: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
    """X with L L^T X = B."""
    factor, right = _batched(input2.mT if upper else input2, self)
    between = substituted(factor, right, upper=False)
    return back_to(substituted(factor.mT, between, upper=True), self)


@rewrites(aten.cholesky_inverse.default)
def cholesky_inverse(self: Tensor, upper: bool = False) -> Tensor:
    """The inverse of L L^T."""
    size = known_size(self)
    return back_to(cholesky_solve(identity_like(self, size, size), in_double(self), upper), self)


# --- determinants, inverses, solutions -------------------------------------------------------------


def _determinant(matrix: Tensor) -> Tensor:
    work, pivots, _, _ = factor_lu(matrix)
    size = known_size(matrix)
    moved = (pivots != torch.arange(1, size + 1)).to(torch.float64)
    return torch.prod(torch.diagonal(work, dim1=-2, dim2=-1) * (1.0 - 2.0 * moved), dim=-1)


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


@rewrites(aten.linalg_lu_solve.default)
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """X with A X = B (X A = B when `left` is false; A transposed when `adjoint`), A factored."""
    if not left:
        return lu_solve(LU, pivots, B.mT, adjoint=not adjoint).mT
    work, right = _batched(LU, B)
    swaps = pivots.expand(*right.shape[:-2], pivots.shape[-1])
    if adjoint:
        between = substituted(work.mT, right, upper=False)
        solution = _with_swaps(substituted(work.mT, between, upper=True, unit=True), swaps, undone=True)
    else:
        between = substituted(work, _with_swaps(right, swaps), upper=False, unit=True)
        solution = substituted(work, between, upper=True)
    return back_to(solution, B)


def _solved(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the solution (NaN of a singular matrix), and the factorisation: LU, pivots, info."""
    work, pivots, _, info = factor_lu(matrix)
    solution = torch.where((info == 0)[..., None, None], lu_solve(work, pivots, right), torch.nan)
    return solution, work, pivots.to(torch.int32), info.to(torch.int32)


@rewrites(aten.linalg_inv.default, aten.inverse.default)
def inv(A: Tensor) -> Tensor:
    """The inverse."""
    return inv_ex(A)[0]


@rewrites(aten.linalg_inv_ex.default)
def inv_ex(A: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """The inverse, and `info`."""
    size = known_size(A)
    inverse, _, _, info = _solved(in_double(A), identity_like(A, size, size))
    return back_to(inverse, A), info


@rewrites(aten.linalg_tensorinv.default)
def tensorinv(self: Tensor, ind: int = 2) -> Tensor:
    """The inverse of a tensor as a matrix: its first `ind` axes are the rows."""
    rows, columns = self.shape[:ind], self.shape[ind:]
    return inv(self.reshape(math.prod(rows), math.prod(columns))).reshape(*columns, *rows)


@rewrites(aten.linalg_matrix_exp.default, aten.matrix_exp.default)
def matrix_exp(self: Tensor) -> Tensor:
    """exp of a matrix: Taylor's series of A / 2^10, squared ten times."""
    size = known_size(self)
    scaled = in_double(self) * 2.0**-10
    term = identity_like(self, size, size)
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
    return solve_ex(A, B, left=left)[0]


@rewrites(aten._linalg_solve_ex.default)
def solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The solution, and the factorisation of A: LU, pivots, info."""
    is_vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    columns = B.unsqueeze(-1) if is_vector else B
    if left or is_vector:
        solution, *factors = _solved(*_batched(A, columns))
    else:
        matrix, right = _batched(A.mT, columns.mT)
        solution = _solved(matrix, right)[0].mT
        factors = [*lu_factor_ex(in_double(A))]
    work, pivots, info = factors
    result = solution.squeeze(-1) if is_vector else solution
    return back_to(result, A), back_to(work, A), pivots, info


@rewrites(aten.linalg_cholesky.default, *present_operators("cholesky"))
def cholesky(self: Tensor, upper: bool = False) -> Tensor:
    """L with L L^T = A (or its transpose)."""
    return cholesky_ex(self, upper=upper)[0]


@rewrites(aten.linalg_cholesky_ex.default)
def cholesky_ex(self: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """L with L L^T = A (or its transpose), and `info`. Half of A is read: the lower triangle, or the upper."""
    size = known_size(self)

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (work, info), (number, here, after) = states, slices
        column = at(here, work, -1)
        head = at(here, column, -1).unsqueeze(-1)
        scaled = torch.where(here | after, column / torch.sqrt(head), 0.0)
        stopped = ~(head.squeeze(-1) > 0) & (info == 0)
        work = work - scaled.unsqueeze(-1) * scaled.unsqueeze(-2)
        return [work, torch.where(stopped, number, info)], [scaled]

    work = in_double(self.mT if upper else self)
    sequences = [torch.arange(1, size + 1), *places(size, size)]
    (_, info), (columns,) = loop(
        step, [work, _no_info(work)], sequences, without_steps=[work.new_zeros(0, *work.shape[:-1])]
    )
    lower = back_to(columns_last(columns), self)
    return (lower.mT if upper else lower), info.to(torch.int32)

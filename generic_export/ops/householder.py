"""QR of matrices of known size, by Householder's reflections, one column a step of a loop, in f64; signs are LAPACK's."""

# ruff: noqa: N803  (the schemas' own parameter names)

from __future__ import annotations

import torch

from generic_export.ops.matrix import at, columns_first, columns_last, identity_like, known_size, places
from generic_export.ops.special import back_to, in_double
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.loops import loop

aten = torch.ops.aten
Tensor = torch.Tensor


def reflections(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return R [.., m, n], the reflections' vectors [k, .., m] (1 at their own place) and factors [k, ..]."""
    row_count, column_count = known_size(matrix, -2), known_size(matrix)

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (work,), (here, below, this_column, columns_after) = states, slices
        column = at(this_column, work, -1)
        head = at(here, column, -1).unsqueeze(-1)
        tail = torch.where(below, column, 0.0)
        rest = (tail * tail).sum(-1, keepdim=True)
        norm = torch.sqrt(head * head + rest)
        # dlarfg: nothing is reflected where there is nothing below the diagonal.
        idle = rest == 0
        beta = torch.where(idle, head, torch.where(head < 0, norm, -norm))
        factor = torch.where(idle, 0.0, (beta - head) / torch.where(idle, 1.0, beta))
        vector = torch.where(here, 1.0, tail / torch.where(idle, 1.0, head - beta))
        shadow = (vector.unsqueeze(-1) * work).sum(-2)
        reflected = work - factor.unsqueeze(-1) * vector.unsqueeze(-1) * shadow.unsqueeze(-2)
        finished = torch.where(here, beta, torch.where(below, 0.0, column)).unsqueeze(-1)
        work = torch.where(this_column, finished, torch.where(columns_after, reflected, work))
        return [work], [vector, factor.squeeze(-1)]

    steps = min(row_count, column_count)
    sequences = [*places(steps, row_count), *places(steps, column_count)]
    work = in_double(matrix)
    none = [work.new_zeros(0, *work.shape[:-1]), work.new_zeros(0, *work.shape[:-2])]
    (upper,), (vectors, factors) = loop(step, [work], sequences, without_steps=none)
    return upper, vectors, factors


def reflected(vectors: Tensor, factors: Tensor, rows: Tensor, *, transpose: bool = False) -> Tensor:
    """Return Q times a matrix (or Q's transpose), Q as the reflections one after another."""

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (work,), (vector, factor) = states, slices
        shadow = (vector.unsqueeze(-1) * work).sum(-2, keepdim=True)
        return [work - factor[..., None, None] * vector.unsqueeze(-1) * shadow], []

    sequences = [vectors, factors] if transpose else [torch.flip(vectors, [0]), torch.flip(factors, [0])]
    (result,), _ = loop(step, [rows], sequences)
    return result


@rewrites(aten.linalg_qr.default)
def qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Q and R (Q is empty in mode "r")."""
    row_count, size = known_size(A, -2), min(known_size(A, -2), known_size(A))
    upper, vectors, factors = reflections(A)
    if mode == "complete":
        size = row_count
    right = back_to(torch.triu(upper)[..., :size, :], A)
    if mode == "r":
        return torch.zeros(0, dtype=A.dtype), right
    return back_to(reflected(vectors, factors, identity_like(A, row_count, size)), A), right


@rewrites(aten.geqrf.default)
def geqrf(self: Tensor) -> tuple[Tensor, Tensor]:
    """R, with the reflections' vectors below its diagonal, and their factors."""
    upper, vectors, factors = reflections(self)
    below = torch.tril(columns_last(vectors), -1)
    count = known_size(below)
    packed = torch.cat([torch.triu(upper[..., :count]) + below, upper[..., count:]], dim=-1)
    return back_to(packed, self), back_to(columns_last(factors), self)


def _unpacked(packed: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors and factors of packed reflections."""
    row_count, count = known_size(packed, -2), known_size(tau)
    vectors = torch.tril(in_double(packed)[..., :count], -1) + torch.eye(row_count, count, dtype=torch.float64)
    return columns_first(vectors), columns_first(in_double(tau))


@rewrites(aten.linalg_householder_product.default)
def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """The first columns of Q."""
    rows, columns = known_size(input, -2), known_size(input)
    return back_to(reflected(*_unpacked(input, tau), identity_like(input, rows, columns)), input)


@rewrites(aten.ormqr.default)
def ormqr(self: Tensor, input2: Tensor, input3: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """Q times a matrix, or a matrix times Q; Q may be transposed."""
    if not left:
        return ormqr(self, input2, input3.mT, transpose=not transpose).mT
    return back_to(reflected(*_unpacked(self, input2), in_double(input3), transpose=transpose), input3)

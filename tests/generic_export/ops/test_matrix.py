"""LU, Cholesky, triangles and what follows from them, in the engine; each test takes several operators through one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from generic_export.errors import T2NError
from generic_export.ops.matrix import lu
from tests.engine_check import check

torch.manual_seed(0)
SQUARE = torch.randn(3, 4, 4)
SQUARE[0, 0, 0] = 0.0  # the first pivot must come from another row
POSITIVE = SQUARE @ SQUARE.mT + torch.eye(4)
TALL = torch.randn(3, 6, 4)
RIGHT = torch.randn(3, 4, 2)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}

linalg = torch.linalg

CASES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "numbers": (lambda x: (linalg.det(x), *linalg.slogdet(x), linalg.matrix_power(x, 3)), (SQUARE,)),
    "logdet": (torch.logdet, (POSITIVE,)),
    "inverses": (
        lambda x: (*linalg.inv_ex(x), linalg.tensorinv(x[0].reshape(4, 2, 2), ind=1)),
        (SQUARE,),
    ),
    "solve": (
        lambda a, b: (
            linalg.solve(a, b.mT, left=False),
            linalg.solve(a[0], b[1, :, 0]),
            *linalg.solve_ex(a, b),
        ),
        (SQUARE, RIGHT),
    ),
    "cholesky": (lambda x: (linalg.cholesky(x), *linalg.cholesky_ex(x, upper=True)), (POSITIVE,)),
    "cholesky_solve": (
        lambda b, x: (torch.cholesky_solve(b, x), torch.cholesky_inverse(x), torch.cholesky_solve(b, x.mT, upper=True)),
        (RIGHT, linalg.cholesky(POSITIVE)),
    ),
    "lu": (lambda x: (*linalg.lu_factor(x), *linalg.lu_factor_ex(x)), (SQUARE,)),
    "lu of a tall and of a wide one": (lambda x: (*linalg.lu(x), *linalg.lu(x.mT)), (TALL,)),
    "lu_solve": (
        lambda a, p, b: (
            linalg.lu_solve(a, p, b),
            linalg.lu_solve(a, p, b, adjoint=True),
            linalg.lu_solve(a, p, b.mT, left=False),
            *torch.lu_unpack(a, p),
        ),
        (*linalg.lu_factor(SQUARE), RIGHT),
    ),
    "triangles": (
        lambda a, b: (
            linalg.solve_triangular(a, b, upper=True),
            linalg.solve_triangular(a, b.mT, upper=False, left=False, unitriangular=True),
            *torch.triangular_solve(b, a, transpose=True),
        ),
        (POSITIVE, RIGHT),
    ),
    "matrix_exp": (lambda x: torch.matrix_exp(x * 0.3), (SQUARE,)),
}


@pytest.mark.parametrize("name", CASES)
def test_small_matrices(name: str) -> None:
    function, arguments = CASES[name]
    check(function, arguments, **CLOSE)


def test_at_another_batch_size() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.linalg.inv(x), torch.linalg.cholesky(x @ x.mT + torch.eye(4))

    check(both, (SQUARE,), (SQUARE[:2],), dynamic_axes={"input_0": {0: "N"}}, **CLOSE)


def test_the_graph_does_not_grow_with_the_matrix() -> None:
    small, large = (check(torch.linalg.inv, (torch.randn(size, size),), **CLOSE) for size in (3, 40))
    assert len(large.splitlines()) == len(small.splitlines())


def test_info_names_the_first_column_that_stops() -> None:
    stopped = torch.stack([torch.diag(torch.tensor([1.0, 0.0, 2.0])), torch.eye(3)])

    def info(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.linalg.inv_ex(x)[1], torch.linalg.cholesky_ex(x)[1], torch.linalg.lu_factor_ex(x)[2]

    check(info, (stopped,))


def test_lu_without_pivots() -> None:
    """PyTorch has it on a GPU alone."""
    _, lower, upper = lu(POSITIVE, pivot=False)
    torch.testing.assert_close(lower @ upper, POSITIVE, **CLOSE)
    torch.testing.assert_close(lower, torch.tril(lower))
    torch.testing.assert_close(upper, torch.triu(upper))


class Orthogonal(nn.Module):
    """A layer whose weight is made of a parameter by Cayley's map: a factorisation of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skew = self.weight - self.weight.mT
        return x @ torch.linalg.solve(torch.eye(5) + skew, torch.eye(5) - skew)


def test_a_loop_over_constants_reads_one_slice_a_step() -> None:
    check(Orthogonal(), (torch.randn(2, 5),), (torch.zeros(2, 5),), **CLOSE)


def test_a_matrix_of_dynamic_size_is_refused() -> None:
    with pytest.raises(T2NError, match="static"):
        check(torch.linalg.det, (torch.randn(7, 7),), dynamic_axes={"input_0": {0: "N", 1: "N"}})

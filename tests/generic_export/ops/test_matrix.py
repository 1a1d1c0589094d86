"""Determinants, inverses and the like of small matrices, unrolled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from generic_export.errors import T2NError
from tests.engine_check import check

torch.manual_seed(0)
SQUARE = torch.randn(3, 4, 4)
SQUARE[0, 0, 0] = 0.0  # the first pivot must come from another row
POSITIVE = SQUARE @ SQUARE.mT + torch.eye(4)

CASES: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]] = {
    "det": (torch.linalg.det, SQUARE),
    "slogdet": (lambda x: tuple(torch.linalg.slogdet(x)), SQUARE),
    "logdet": (torch.logdet, POSITIVE),
    "inv": (torch.linalg.inv, SQUARE),
    "solve": (lambda x: torch.linalg.solve(x, x.mT), SQUARE),
    "solve_vector": (lambda x: torch.linalg.solve(x[0], x[1, 0]), SQUARE),
    "cholesky": (torch.linalg.cholesky, POSITIVE),
    "matrix_exp": (lambda x: torch.matrix_exp(x * 0.3), SQUARE),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x, 3), SQUARE),
}


@pytest.mark.parametrize("name", CASES)
def test_small_matrices(name: str) -> None:
    function, matrix = CASES[name]
    check(function, (matrix,), rtol=1e-3, atol=1e-4)


def test_at_another_batch_size() -> None:
    check(torch.linalg.inv, (SQUARE,), (SQUARE[:2],), dynamic_axes={"input_0": {0: "N"}}, rtol=1e-3, atol=1e-4)


def test_a_large_matrix_is_refused() -> None:
    with pytest.raises(T2NError, match="17 columns"):
        check(torch.linalg.det, (torch.randn(17, 17),))


def test_what_lapack_reports_is_not_made_up() -> None:
    for function in (torch.linalg.inv_ex, torch.linalg.cholesky_ex):
        with pytest.raises(T2NError, match="no NNEF form"):
            check(lambda x, function=function: tuple(function(x)), (POSITIVE,))

"""Diagonals and triangles in the engine, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from generic_export.errors import T2NError
from tests.engine_check import check

Result = torch.Tensor | tuple[torch.Tensor, ...]

CASES: dict[str, Callable[[torch.Tensor], Result]] = {
    "tril": lambda x: (x.tril(), x.tril(-1), x.tril(2)),
    "triu": lambda x: (x.triu(), x.triu(1), (x > 0).triu(-2), (x * 9).long().triu()),
    "causal_mask": lambda x: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1),
    "square_diagonal": lambda x: (x @ x.mT).diagonal(dim1=1, dim2=2),
    "diagonal": lambda x: x.diagonal(0, 2, 0),
    "diagonal_below": lambda x: x.diagonal(-1, 0, 2),
    "diag_embed": lambda x: (torch.diag_embed(x), torch.diag_embed(x, 1, 0, 2), torch.diag_embed(x, -2)),
    "diag": lambda x: torch.diag(x[0, :, 0]),
    "trace": lambda x: torch.trace(x[0].T @ x[0]),
    "triangle_indices": lambda x: x[:, :, None].expand(-1, -1, 4, -1)[..., torch.tril_indices(4, 4)[0], :1],
}


@pytest.mark.parametrize("name", CASES)
def test_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    check(
        CASES[name],
        (torch.randn(3, 6, 4),),
        (torch.randn(3, 5, 4),),
        (torch.randn(3, 9, 4),),
        dynamic_axes={"input_0": {1: "T"}},
        atol=1e-4,
    )


@pytest.mark.parametrize("offset", [-3, -1, 0, 2, 4])
def test_diagonals_of_a_wide_matrix(offset: int) -> None:
    check(
        lambda x: (x.diagonal(offset), x.diagonal_scatter(-x.diagonal(offset), offset), x.tril(offset)),
        (torch.randn(3, 5),),
    )


@pytest.mark.parametrize("offset", [3, -2])
def test_a_diagonal_that_a_small_matrix_does_not_have(offset: int) -> None:
    def with_last(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.diagonal(offset), x[0, -1:]])

    sizes = [(torch.randn(size, size),) for size in (1, 2, 3, 4, 9)]
    check(with_last, (torch.randn(5, 5),), *sizes, dynamic_axes={"input_0": {0: "T", 1: "T"}})


def test_triangle_indices() -> None:
    check(lambda x: (x + torch.tril_indices(3, 4, -1), torch.triu_indices(3, 5, 1) + x[0, 0]), (torch.zeros(2, 3),))


def test_triangle_indices_of_a_dynamic_size_are_refused() -> None:
    with pytest.raises(T2NError):
        check(
            lambda x: torch.tril_indices(x.shape[0], x.shape[0]), (torch.randn(4),), dynamic_axes={"input_0": {0: "T"}}
        )

"""Running sums, products and extrema in the engine, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

INFINITY = float("inf")
Result = torch.Tensor | tuple[torch.Tensor, ...]

CASES: dict[str, Callable[[torch.Tensor], Result]] = {
    "cumsum": lambda x: (x.cumsum(1), x.cumsum(-1), x.cumsum(0, dtype=torch.float64), (x > 0).cumsum(1)),
    "cumprod": lambda x: (x.cumprod(1), x.cumprod(0), (x * 3).long().cumprod(2)),
    "cummax": lambda x: (*x.cummax(1), *x.round().cummax(1), *(x * 2).long().cummax(1)),
    "cummin": lambda x: (*x.cummin(1), *x.round().cummin(-1), *(x > 0).cummin(1)),
    "logcumsumexp": lambda x: ((x * 30).logcumsumexp(1), x.logcumsumexp(2)),
    "mask_positions": lambda x: (x > 0).long().cumsum(1).masked_fill(x <= 0, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    check(
        CASES[name],
        (torch.randn(2, 6, 3),),
        (torch.randn(2, 1, 3),),
        (torch.randn(2, 11, 3),),
        dynamic_axes={"input_0": {1: "T"}},
        atol=1e-4,
    )


@pytest.mark.parametrize("name", CASES)
def test_at_a_static_size(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name], (torch.randn(2, 7, 3),), atol=1e-4)


def test_a_tensor_without_axes() -> None:
    check(
        lambda x: (x.cumsum(0), x.cumprod(0), *x.cummax(0), x.logcumsumexp(0)),
        (torch.tensor(2.5),),
    )


def test_infinities() -> None:
    rows = torch.tensor([[-INFINITY, -INFINITY, 1.0, 2.0], [0.0, INFINITY, 1.0, -INFINITY]])
    check(lambda x: (x.logcumsumexp(1), *x.cummax(1), *x.cummin(1)), (rows,))
    check(lambda x: (*x.cummax(1), *x.cummin(1)), (rows,), dynamic_axes={"input_0": {1: "T"}})


def test_integers_beyond_32_bits() -> None:
    check(lambda x: (x.cumsum(0), x.cumprod(0)), (torch.tensor([2**33, 3, 5, -2]),))

"""Reductions in the engine: axes, element types, infinities, tensors without axes, sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

INFINITY = float("inf")
Result = torch.Tensor | tuple[torch.Tensor, ...]

DYNAMIC: dict[str, Callable[[torch.Tensor], Result]] = {
    "sums": lambda x: (x.sum(), x.sum(1), x.sum((0, -1), keepdim=True), x.sum(dtype=torch.float64)),
    "means": lambda x: (x.mean(), x.mean(-2), x.mean((0, 1))),
    "products": lambda x: ((x / 2).prod(1), (x / 2).prod(-1, keepdim=True)),
    "extrema": lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min()),
    "max_and_min": lambda x: (*x.max(1), *x.min(-1, keepdim=True)),
    "positions": lambda x: (x.argmax(), x.argmax(1), x.argmin(-1, keepdim=True), x.argmin(keepdim=True)),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "truth": lambda x: ((x > 2).any(), (x > 0).any(1), (x > -1).all((0, 1)), (x > -9).all()),
    "counts": lambda x: (torch.count_nonzero(x > 0), torch.count_nonzero(x, dim=1), (x > 0).sum(1)),
    "spread": lambda x: (x.var(), x.std(1), x.var(1, correction=0), x.std((0, 1), correction=0.5, keepdim=True)),
    "spread_and_mean": lambda x: (*torch.var_mean(x, 1), *torch.std_mean(x, (0, 2), correction=2)),
    "norms": lambda x: tuple(torch.linalg.vector_norm(x, p, 1) for p in (0, 0.5, 1, 2, 3, INFINITY, -INFINITY)),
    "frobenius": lambda x: (x.norm(), torch.linalg.matrix_norm(x), torch.nn.functional.normalize(x, dim=1)),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)),
    "nan_aware": lambda x: (torch.where(x > 1, torch.nan, x).nansum(1), torch.where(x > 1, torch.nan, x).nanmean(1)),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    check(
        DYNAMIC[name],
        (torch.randn(3, 6, 4),),
        (torch.randn(3, 5, 4),),
        (torch.randn(3, 11, 4),),
        dynamic_axes={"input_0": {1: "T"}},
        atol=1e-4,
    )


WITHOUT_AXES: dict[str, Callable[[torch.Tensor], Result]] = {
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(-1, keepdim=True), x.mean(), x.prod(), x.prod(0)),
    "extrema": lambda x: (x.amax(), x.amin(0), x.max(), *x.max(0), *x.min(-1)),
    "positions": lambda x: (x.argmax(), x.argmin(0)),
    "truth": lambda x: (x.any(), x.all(0), torch.count_nonzero(x)),
    "spread": lambda x: (x.var(correction=0), x.std()),
    "norms": lambda x: (x.norm(), torch.linalg.vector_norm(x, 0), torch.linalg.vector_norm(x, INFINITY)),
    "logsumexp": lambda x: x.logsumexp(0),
}


@pytest.mark.parametrize("name", WITHOUT_AXES)
def test_a_tensor_without_axes(name: str) -> None:
    check(WITHOUT_AXES[name], (torch.tensor(-1.5),), (torch.tensor(0.0),))


EMPTY: dict[str, Callable[[torch.Tensor], Result]] = {
    "over_the_empty_axis": lambda x: (x.sum(1), x.prod(1), x.mean(1), (x > 0).any(1), (x > 0).all(1), x.sum()),
    "beside_the_empty_axis": lambda x: (x.sum(0), x.mean(0), x.amax(0), x.argmax(0)),
    "spread": lambda x: (x.var(1), x.norm(dim=1), x.logsumexp(0)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_axis(name: str) -> None:
    check(EMPTY[name], (torch.zeros(3, 0),))


INFINITE: dict[str, Callable[[torch.Tensor], Result]] = {
    "extrema": lambda x: (x.amax(1), x.amin(1), x.amax(0), x.max(), *x.max(1), *x.min(1)),
    "positions": lambda x: (x.argmax(1), x.argmin(1)),
    "logsumexp": lambda x: x.logsumexp(1),
    "half": lambda x: (x.half().amax(1).float(), x.half().logsumexp(1).float(), x.double().amin(1)),
}


@pytest.mark.parametrize("name", INFINITE)
def test_rows_of_infinities(name: str) -> None:
    rows = [[-INFINITY] * 3, [INFINITY] * 3, [-INFINITY, 1, 2], [INFINITY, 1, -INFINITY], [-3.4e38] * 3]
    check(INFINITE[name], (torch.tensor(rows),))


INTEGERS: dict[str, Callable[[torch.Tensor], Result]] = {
    "sum": lambda x: (x.sum(), x.sum(1), x.sum(0, dtype=torch.float32), x.float().mean(1)),
    "product": lambda x: ((x % 7 + 1).prod(1), (x % 7 + 1).prod(0, dtype=torch.float32)),
    "extrema": lambda x: (x.amax(1), x.amin(), *x.max(0), x.argmax(1)),
    "truth": lambda x: (x.any(1), x.all(), torch.count_nonzero(x, 0)),
    "narrow": lambda x: ((x % 7).to(torch.int8).sum(1), (x % 7).to(torch.int32).sum(), (x % 7).to(torch.uint8).amax(0)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_beyond_32_bits(name: str) -> None:
    check(INTEGERS[name], (torch.tensor([[2**33, 3, -1], [2**31, 2**31, 0]]),), rtol=1e-6)


def test_bools_have_extrema_and_positions() -> None:
    check(
        lambda x: (x.amax(1), x.amin(1), *x.max(1), *x.min(0), x.sum(), x.int().argmax(1)),
        (torch.tensor([[True, False, True], [False, False, False]]),),
    )


def test_half_precision_accumulates_in_single() -> None:
    check(lambda x: (x.sum(1), x.mean(1), x.var(1), x.norm(dim=1)), (torch.full((2, 3000), 3.0).half(),), rtol=1e-2)


def test_ties_go_to_the_first() -> None:
    check(lambda x: (x.argmax(1), x.max(1)[1], x.argmin(1)), (torch.tensor([[1.0, 3, 3, 1], [2, 2, 2, 2]]),))

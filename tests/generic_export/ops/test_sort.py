"""Orders and searches in the engine, at sizes other than the traced one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

Result = torch.Tensor | tuple[torch.Tensor, ...]
EDGES = torch.tensor([-1.0, 0.0, 0.0, 1.5])

CASES: dict[str, Callable[[torch.Tensor], Result]] = {
    "sort": lambda x: (*x.sort(1), *x.sort(-1, descending=True)),
    "stable": lambda x: (*x.round().sort(dim=1, stable=True), *x.round().sort(stable=True, dim=1, descending=True)),
    "integers": lambda x: ((x * 9).long().sort(1)[0], (x > 0).sort(dim=1, stable=True)[1]),
    "argsort": lambda x: (x.argsort(1), x.argsort(dim=1, descending=True, stable=True)),
    "ranks": lambda x: x.argsort(1).argsort(1) + x.argsort(1),
    "sorted_then_used": lambda x: x.sort(1)[0] + x,
    "topk": lambda x: (*x.topk(2, 1), *x.topk(3, largest=False)),
    "msort": lambda x: torch.msort(x),
    "kthvalue": lambda x: (*x.kthvalue(2, 1), *x.kthvalue(3, keepdim=True)),
    "median": lambda x: (*x.median(1), *x.median(-1, keepdim=True), x.median()),
    "nanmedian": lambda x: (
        torch.where(x > 0.5, torch.nan, x).nanmedian(1)[0],
        torch.where(x > 1, torch.nan, x).nanmedian(),
    ),
    "quantile": lambda x: (x.quantile(0.3, 1), x.quantile(torch.tensor([0.0, 0.5, 1.0]), -1, keepdim=True)),
    "mode": lambda x: (*x.round().mode(1), *(x * 2).long().mode(1, keepdim=True)),
    "top_p": lambda x: x.softmax(1).sort(1, descending=True)[0].cumsum(1) <= 0.8,
    "bucketize": lambda x: (torch.bucketize(x, EDGES), torch.bucketize(x, EDGES, right=True, out_int32=True)),
    "searchsorted": lambda x: torch.searchsorted(x.sort(-1)[0], x[..., :2].contiguous(), side="right"),
    "searched_number": lambda x: torch.searchsorted(EDGES, 0.0, right=True) + x.long(),
    "histc": lambda x: (x.histc(5, -1, 2), x.histc(4)),
    "nonzero_static": lambda x: (
        torch.nonzero_static(x > 0, size=7),
        torch.nonzero_static(x > 9, size=2, fill_value=3),
    ),
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).long(), 3),
    "isin": lambda x: (torch.isin((x * 3).long(), torch.tensor([0, 2, -1])), torch.isin(x.round(), EDGES, invert=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    check(
        CASES[name],
        (torch.randn(2, 6, 5),),
        (torch.randn(2, 3, 5),),
        (torch.randn(2, 11, 5),),
        dynamic_axes={"input_0": {1: "T"}},
    )


def test_histogram() -> None:
    # PyTorch has no symbolic form of it: static sizes only.
    check(
        lambda x, w: (
            *torch.histogram(x, 4, range=(-1.0, 1.0), density=True),
            *torch.histogram(x, 5),
            *torch.histogram(x, torch.tensor([-1.0, 0.0, 0.5])),
            torch.histogram(x, 3, weight=w)[0],
            *torch.histogram(x[:1, :1], 2),
            x[:1, :1].histc(2),
        ),
        (torch.randn(3, 7), torch.rand(3, 7)),
    )


def test_a_tensor_without_axes() -> None:
    check(
        lambda x: (*x.sort(), *x.topk(1, 0), x.argsort(), *x.median(0), x.median(), *x.kthvalue(1), *x.mode()),
        (torch.tensor(2.5),),
    )


def test_a_row_of_nothing_but_nan_has_no_median() -> None:
    check(lambda x: x.nanmedian(1)[0], (torch.tensor([[torch.nan, torch.nan], [torch.nan, 1.0]]),))

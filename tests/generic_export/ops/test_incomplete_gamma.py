"""igamma and igammac over shapes from 0.01 to ten thousand, both branches and their ends."""

from __future__ import annotations

import math

import torch

from generic_export.ops.incomplete_gamma import igamma
from tests.engine_check import check

SHAPES = torch.tensor([0.01, 0.3, 1.0, 3.0, 10.0, 19.9, 20.0, 25.0, 60.0, 150.0, 1e4])
PLACES = torch.tensor([0.001, 0.3, 1.0, 1.5, 3.0, 11.0, 20.9, 25.0, 60.0, 145.0, 155.0, 1e4])
ENDS = (
    torch.tensor([0.0, 0.0, 2.0, -1.0, 3.0, math.inf, 2.0, math.nan]),
    torch.tensor([0.0, 1.0, 0.0, 1.0, -1.0, 2.0, math.inf, 1.0]),
)


def test_both_shares() -> None:
    def both(a: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.igamma(a, x), torch.igammac(a, x)

    grid = tuple(values.flatten() for values in torch.meshgrid(SHAPES, PLACES, indexing="ij"))
    check(both, grid, rtol=1e-4)
    check(both, ENDS)


def test_precision_where_the_branches_meet() -> None:
    a = torch.linspace(0.05, 40.0, 400, dtype=torch.float64)
    for x in (a + 0.999, a + 1.001):
        torch.testing.assert_close(igamma(a, x), torch.igamma(a, x), rtol=1e-8, atol=1e-10)

"""A repeated constant that goes through a product keeps its repeated axis (tract's einsum forgets it)."""

from __future__ import annotations

import torch
from torch import nn

from tests.engine_check import check

AXES = {"input_0": {0: "B"}}


class ProjectedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.linear = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.queries.expand(x.shape[0], -1, -1).transpose(0, 1).tanh())


def test_projected_queries_have_the_batch() -> None:
    check(ProjectedQueries(), (torch.randn(2, 3),), (torch.randn(4, 3),), dynamic_axes=AXES)


def test_a_repeated_activation_has_its_copies() -> None:
    weight = nn.Linear(8, 6)
    check(lambda x: weight(x[:, None].expand(-1, 3, -1)), (torch.randn(2, 8),), (torch.randn(4, 8),), dynamic_axes=AXES)

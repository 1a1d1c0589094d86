"""Convolutions over maps that are repeated for each of several queries, as DETR's mask head has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine_check import check

AXES = {"input_0": {0: "B"}, "input_1": {0: "B"}, "input_2": {0: "B"}}


class RepeatedMaps(nn.Module):
    """One map a picture, joined with one a query, or projected."""

    def __init__(self, kernel: int, *, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.first = nn.Conv2d(4 + 2 if joined else 4, 6, kernel, padding=kernel // 2)
        self.norm = nn.GroupNorm(2, 6)
        self.second = nn.Conv2d(6, 3, 3, padding=1)
        self.adapter = nn.Conv2d(2, 3, kernel, padding=kernel // 2)

    def forward(self, maps: torch.Tensor, larger: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        queries = attention.shape[1]
        repeated = maps.unsqueeze(1).expand(-1, queries, -1, -1, -1).flatten(0, 1)
        attention = attention.flatten(0, 1)
        x = self.first(torch.cat([repeated, attention], dim=1) if self.joined else repeated)
        x = self.second(self.norm(x).relu())
        adapted = self.adapter(larger.unsqueeze(1).expand(-1, queries, -1, -1, -1).flatten(0, 1))
        x = adapted + nn.functional.interpolate(x, size=adapted.shape[-2:], mode="nearest")
        return x.view(-1, queries, *x.shape[1:])


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 4, 6, 5), torch.randn(batch, 2, 12, 10), torch.randn(batch, 7, 2, 6, 5)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("joined", [True, False])
def test_maps_of_every_query(kernel: int, joined: bool) -> None:
    torch.manual_seed(0)
    check(RepeatedMaps(kernel, joined=joined), inputs(2), inputs(1), inputs(3), dynamic_axes=AXES)

"""segment_reduce with lengths and offsets that are data, and histograms over two axes."""

from __future__ import annotations

import pytest
import torch

from tests.engine_check import check

torch.manual_seed(3)
ROWS = torch.randn(6, 3)
LENGTHS, OTHER_LENGTHS = torch.tensor([2, 0, 4]), torch.tensor([1, 5, 0])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments_by_length(reduce: str) -> None:
    def reduced(data: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain = torch.segment_reduce(data, reduce, lengths=lengths, unsafe=True)
        begun = torch.segment_reduce(data, reduce, lengths=lengths, unsafe=True, initial=0.5)
        return plain, begun

    check(reduced, (ROWS, LENGTHS), (ROWS, OTHER_LENGTHS))


def test_segments_by_offset_along_another_axis() -> None:
    def reduced(data: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(data, "sum", offsets=offsets, axis=1, unsafe=True)

    check(reduced, (torch.randn(2, 6, 3), torch.tensor([[0, 2, 2, 6], [0, 1, 5, 6]])))


def test_histograms_over_two_axes() -> None:
    def equal(points: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.histogramdd(points, [3, 4])
        return found.hist, *found.bin_edges

    def weighed(points: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.histogramdd(points, [3, 4], range=[0.0, 1.0, 0.1, 0.9], weight=weight, density=True).hist

    points = torch.rand(20, 2)
    check(equal, (points,), (points * 3,))
    check(weighed, (points, torch.rand(20)))

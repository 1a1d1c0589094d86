"""Features of regions: what torchvision's roi_align computes, at any number of regions and any size of map."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from generic_export.errors import CaptureError, UnsupportedOperatorError
from generic_export.torch_graph.decompose.region_features import roi_align
from tests.engine_check import check

AXES = {"input_0": {0: "B", 2: "H", 3: "W"}, "input_1": {0: "K"}}


def _drawn(seed: int, batch: int, height: int, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw maps, and boxes inside, across the edges and beyond them, some of no area or turned round."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 60 - 10
    box = torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * 40 - 4], 1)
    number = torch.randint(batch, (count, 1), generator=generator).float()
    return torch.randn(batch, 3, height, width, generator=generator), torch.cat([number, box], 1)


def _by_hand(
    maps: torch.Tensor, rois: torch.Tensor, scale: float, cells: tuple[int, int], samples: int, aligned: bool
) -> Any:
    """Take the mean of samples one by one, as the kernel for a CPU does."""
    height, width = maps.shape[2:]
    result = torch.zeros(len(rois), maps.shape[1], *cells)

    def neighbours(place: float, size: int) -> list[tuple[int, float]]:
        if place < -1 or place > size:
            return []
        place = max(place, 0.0)
        low = min(int(place), size - 1)
        return [(low, 1.0)] if low == size - 1 else [(low, 1 - place + low), (low + 1, place - low)]

    for region, (number, *sides) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (side * scale - 0.5 * aligned for side in sides)
        least = -math.inf if aligned else 1.0
        tall, wide = max(y2 - y1, least) / cells[0], max(x2 - x1, least) / cells[1]
        for row in range(cells[0] * samples):
            for column in range(cells[1] * samples):
                y, x = y1 + (row + 0.5) * tall / samples, x1 + (column + 0.5) * wide / samples
                for i, share in neighbours(y, height):
                    for j, other in neighbours(x, width):
                        value = maps[int(number), :, i, j] * share * other / samples**2
                        result[region, :, row // samples, column // samples] += value
    return result


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_the_mean_of_bilinear_samples(samples: int, aligned: bool) -> None:
    maps, rois = _drawn(samples, 2, 9, 7, 12)
    expected = _by_hand(maps, rois, 0.2, (2, 3), samples, aligned)
    torch.testing.assert_close(roi_align(maps, rois, 0.2, 2, 3, samples, aligned), expected, rtol=1e-4, atol=1e-5)


def test_at_other_sizes() -> None:
    sizes = [_drawn(0, 2, 9, 8, 5), _drawn(1, 3, 12, 20, 9), _drawn(2, 1, 5, 6, 2)]
    check(lambda x, rois: roi_align(x, rois, 0.2, 2, 3, 2, False), *sizes, dynamic_axes=AXES)


def test_a_number_of_samples_that_depends_on_the_region_is_refused() -> None:
    with pytest.raises(CaptureError, match="Set sampling_ratio above 0"):
        roi_align(*_drawn(0, 1, 5, 5, 1), 1.0, 2, 2, -1, False)


def test_torchvision_operators_in_a_module() -> None:
    ops = pytest.importorskip("torchvision.ops", reason="torchvision is not installed (the extra zoo).")
    sizes = [_drawn(0, 2, 9, 8, 5), _drawn(1, 3, 12, 20, 9)]
    check(lambda x, rois: ops.roi_align(x, rois, (2, 3), 0.2, 2, aligned=True), *sizes, dynamic_axes=AXES)
    with pytest.raises(UnsupportedOperatorError, match="bounded_nms"):
        check(lambda boxes: ops.nms(boxes, boxes[:, 0], 0.5), (torch.rand(4, 4),))
    with pytest.raises(CaptureError, match="sampling_ratio"):
        check(lambda x, rois: ops.roi_align(x, rois, 2), _drawn(0, 1, 5, 5, 2))

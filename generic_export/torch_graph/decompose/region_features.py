"""`roi_align` with tensors of PyTorch alone: features read between the cells of a map, for a known number of regions.

The samples' four neighbours are rows of one table, [cells, C], so that regions may lie on maps of several sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from generic_export.errors import CaptureError

Size = int | torch.SymInt


@dataclass(frozen=True)
class RegionGrid:
    """How regions are cut.

    Attributes:
        height, width: cells of a region's result.
        samples: of each cell, along each axis.
        aligned: whether a pixel's centre is at 0.5.
    """

    height: Size
    width: Size
    samples: int
    aligned: bool = False


def roi_align(
    input: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: Size,
    pooled_width: Size,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Return what `torchvision::roi_align` does: features [K, C, pooled_height, pooled_width].

    Args:
        input: feature maps [B, C, H, W].
        rois: number of the map, x1, y1, x2, y2 in [K, 5].
        spatial_scale: of the boxes.
        pooled_height, pooled_width, sampling_ratio, aligned: see `RegionGrid`.

    Raises:
        CaptureError: the number of samples is to depend on the size of a region.
    """
    height, width = input.shape[2:]
    offsets = rois[:, 0].long() * (height * width)
    sizes = torch.stack([rois.new_full((), height), rois.new_full((), width)]).unsqueeze(0)
    grid = RegionGrid(pooled_height, pooled_width, sampling_ratio, aligned)
    return sampled(table_of([input]), rois[:, 1:] * spatial_scale, offsets, sizes, grid)


def table_of(maps: list[torch.Tensor]) -> torch.Tensor:
    """Return the cells of feature maps [B, C, H, W] below each other, [cells, C]."""
    return torch.cat([each.permute(0, 2, 3, 1).flatten(0, 2) for each in maps])


def sampled(
    table: torch.Tensor, boxes: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, grid: RegionGrid
) -> torch.Tensor:
    """Return features [K, C, height, width] of regions: the mean of bilinear samples in each cell.

    Source: Mask R-CNN (https://arxiv.org/abs/1703.06870), section 3, and torchvision's kernel for a CPU for the edges.

    Args:
        table: cells of all maps [cells, C].
        boxes: x1, y1, x2, y2 in cells of each one's map [K, 4].
        offsets: row of the table where each one's map begins, i64 [K].
        sizes: height and width of each one's map, as boxes' element type [K, 2] or [1, 2].
        grid: how they are cut.

    Raises:
        CaptureError: the number of samples is to depend on the size of a region.
    """
    if grid.samples <= 0:
        raise CaptureError(
            f"the number of roi_align samples depends on the region (sampling_ratio={grid.samples}).",
            "Set sampling_ratio above 0: the graph has a fixed number of samples.",
        )
    corners = boxes - (0.5 if grid.aligned else 0.0)
    x1, y1, x2, y2 = corners.unsqueeze(2).unbind(1)
    rows = _between(y1, y2, sizes[:, :1], grid.height, grid)
    columns = _between(x1, x2, sizes[:, 1:], grid.width, grid)
    widths = sizes[:, 1:, None].long()
    total: Any = 0
    for row, row_share in rows:
        for column, column_share in columns:
            cells = offsets[:, None, None] + row.unsqueeze(2) * widths + column.unsqueeze(1)  # [K, rows, columns]
            total = total + table[cells] * (row_share.unsqueeze(2) * column_share.unsqueeze(1)).unsqueeze(3)
    folded = total.unflatten(2, (grid.width, grid.samples)).unflatten(1, (grid.height, grid.samples))
    return folded.mean((2, 4)).permute(0, 3, 1, 2)


def _between(
    start: torch.Tensor, end: torch.Tensor, size: torch.Tensor, cells: Size, grid: RegionGrid
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return the two neighbours of each sample along an axis, and the share that each has: i64 and float [K, cells * samples]."""
    length = end - start
    if not grid.aligned:
        length = length.clamp(min=1.0)
    cell: Any = length / cells  # a tensor; by its types alone PyTorch 2.15 also allows a SymFloat
    first = start + torch.arange(cells, device=start.device, dtype=start.dtype) * cell  # type: ignore[arg-type]
    within = (torch.arange(grid.samples, device=start.device, dtype=start.dtype) + 0.5) * (cell / grid.samples)
    places = (first.unsqueeze(2) + within.unsqueeze(1)).flatten(1)
    outside = (places < -1) | (places > size)
    places = places.clamp(min=0)
    low = torch.minimum(places.floor(), size - 1)
    high = torch.minimum(low + 1, size - 1)
    share = torch.where(low == high, 0.0, places - low)
    inside = torch.where(outside, 0.0, 1.0).to(share.dtype)
    return (low.long(), (1 - share) * inside), (high.long(), share * inside)


__all__ = ["RegionGrid", "roi_align", "sampled", "table_of"]

"""Histograms over several axes: each point belongs to one bin of every axis. `sort.py` has those of one axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor


@rewrites(aten._histogramdd_bin_edges.default)
def bin_edges(
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> list[Tensor]:
    """Equal bins for each axis of points [.., D], between the bounds or the smallest and the largest value."""
    points = self.reshape(-1, self.shape[-1])
    return [_edges(points[:, axis], count, range[2 * axis : 2 * axis + 2] if range else None)
            for axis, count in enumerate(bins)]  # fmt: skip


def _edges(values: Tensor, count: int, bounds: Sequence[float] | None) -> Tensor:
    if bounds is None:
        least, most = values.amin(), values.amax()
    else:
        least, most = (torch.full((), bound, dtype=values.dtype) for bound in bounds)
    single = least == most  # PyTorch widens a range of one value on both sides
    least, most = torch.where(single, least - 0.5, least), torch.where(single, most + 0.5, most)
    # As torch.linspace does it: each half counts from its own end.
    places, step = torch.arange(count + 1, dtype=values.dtype), (most - least) / count
    return torch.where(places < (count + 1) // 2, least + step * places, most - step * (count - places))


@rewrites(aten._histogramdd_from_bin_cts.default)
def counts_in_equal_bins(
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Tensor:
    """How many points, or how much weight, each bin holds."""
    return counts_between(self, bin_edges(self, bins, range=range), weight=weight, density=density)


@rewrites(aten._histogramdd_from_bin_tensors.default)
def counts_between(
    self: Tensor, bins: Sequence[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    """The same for bins of given edges; the last one of each axis includes its upper edge."""
    points = self.reshape(-1, self.shape[-1])
    members = torch.ones_like(points[:, :1]) if weight is None else weight.reshape(-1, 1).to(points.dtype)
    for axis, edges in enumerate(bins):
        value, begins, ends = points[:, axis : axis + 1], edges[:-1], edges[1:]
        on_the_edge = (value == ends) & (torch.arange(ends.shape[0]) == ends.shape[0] - 1)
        member = ((value >= begins) & ((value < ends) | on_the_edge)).to(points.dtype)
        members = (members.unsqueeze(-1) * member.unsqueeze(1)).flatten(1)
    counts = members.sum(0).reshape([edges.shape[0] - 1 for edges in bins])
    if not density:
        return counts
    counts = counts / counts.sum()
    for axis, edges in enumerate(bins):
        widths = (edges[1:] - edges[:-1]).reshape([-1 if place == axis else 1 for place in range(len(bins))])
        counts = counts / widths
    return counts

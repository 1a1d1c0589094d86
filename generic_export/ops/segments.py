"""`segment_reduce`: parts of an axis, of lengths that are data, each reduced to one value."""

from __future__ import annotations

import math

import torch

from generic_export.errors import TranslationError
from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor

_NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}


@rewrites(aten.segment_reduce.default)
def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """One value for each segment along `axis`; an empty one is `initial`, or what the reduction begins with (NaN of a mean)."""
    if lengths is not None and offsets is None:
        ends = torch.cumsum(lengths, dim=axis)
        begins = ends - lengths
    elif offsets is None:
        raise TranslationError("segment_reduce needs lengths or offsets.", "Pass lengths or offsets.")
    else:
        begins, ends = (
            offsets.narrow(axis, 0, offsets.shape[axis] - 1),
            offsets.narrow(axis, 1, offsets.shape[axis] - 1),
        )
    places = torch.arange(data.shape[axis])
    inside = (places >= begins.unsqueeze(-1)) & (places < ends.unsqueeze(-1))  # [.., segments, places]
    counts = inside.to(data.dtype).sum(-1)
    trailing = data.dim() - axis - 1
    values = data.unsqueeze(axis)
    for _ in range(trailing):
        inside, counts = inside.unsqueeze(-1), counts.unsqueeze(-1)
    start = _NEUTRAL[reduce] if initial is None else float(initial)
    chosen = torch.where(inside, values, _NEUTRAL[reduce]).to(data.dtype)
    return _reduced(chosen, reduce, axis + 1, counts, start, given=initial is not None)


def _reduced(chosen: Tensor, reduce: str, axis: int, counts: Tensor, start: float, *, given: bool) -> Tensor:
    if reduce == "max":
        return torch.clamp(chosen.amax(axis), min=start) if given else chosen.amax(axis)
    if reduce == "min":
        return torch.clamp(chosen.amin(axis), max=start) if given else chosen.amin(axis)
    if reduce == "prod":
        return chosen.prod(axis) * start
    total = chosen.sum(axis) + start
    if reduce == "sum":
        return total
    empty = torch.full((), start if given else math.nan, dtype=chosen.dtype)
    return torch.where(counts == 0, empty, total / torch.clamp(counts, min=1.0))

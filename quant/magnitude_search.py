"""The data-free search: each value matters as much as it is large. A leaner relative of `weighted_search`, for the stream.

In: a weight. Out: `Q4Blocks`. A few scales are tried with both signs, all operations in place on blocks that stay in cache.
"""

from __future__ import annotations

import torch

from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.weighted_search import HIGHEST, LOWEST

# Where the signed maximum lands, in steps, before the scale is refitted to the levels. Twelve more positions and two more
# refits lower the weighted error by less than 1 % more, and take three times as long.
_POSITIONS = (-8.0, -8.5, -8.2, -7.6, -7.0, 7.1, 7.6)

_CHUNK_VALUES = 1 << 17
_TINIEST_MAXIMUM = 1e-8  # below, every scale rounds to zero in float16
_LARGEST_SCALE = torch.finfo(torch.float16).max
_TINY = torch.finfo(torch.float32).tiny


def magnitude_search(weight: torch.Tensor) -> Q4Blocks:
    """Choose scales and levels that nearly minimise sum(|w| (w - value)^2) in every group.

    Args:
        weight: finite float [..., K], K a multiple of 32; any float dtype, computed with in float32.
    """
    groups = weight.detach().reshape(-1, GROUP)
    levels = torch.empty(groups.shape, dtype=torch.uint8)
    scales = torch.empty(len(groups), dtype=torch.float16)
    step = _CHUNK_VALUES // GROUP
    for start in range(0, len(groups), step):
        piece = slice(start, start + step)
        _search(groups[piece], levels[piece], scales[piece])
    shape = (*weight.shape[:-1], weight.shape[-1] // GROUP)
    return Q4Blocks(levels.reshape(*shape, GROUP), scales.reshape(shape))


def _search(groups: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill in levels [G, 32] and scales [G] of some groups [G, 32]."""
    # [32, G]: sums over a group are sums of whole vectors.
    unit = torch.empty(groups.shape[::-1]).copy_(groups.T)
    largest = signed_maximum(unit)
    alive = largest.abs() >= _TINIEST_MAXIMUM
    unit.mul_(torch.where(alive, 1.0 / largest, 0.0))
    relative = _best_scale(unit)
    d = (relative * largest).clamp_(-_LARGEST_SCALE, _LARGEST_SCALE).to(torch.float16)
    stored = d.to(torch.float32)
    alive &= stored != 0
    unit.mul_(torch.where(alive, largest / stored, 0.0)).round_().clamp_(LOWEST, HIGHEST).add_(ZERO_POINT)
    levels.copy_(unit.to(torch.uint8).T)
    scales.copy_(torch.where(alive, d, 0.0))


def _best_scale(unit: torch.Tensor) -> torch.Tensor:
    """Return the refitted scale with the smallest error, relative to the signed maximum.

    For fixed levels the error is sum(s w^2) - sum(s w q)^2 / sum(s q^2): the largest subtrahend wins.
    """
    share = unit.abs()
    weighted = share * unit
    q, product = torch.empty_like(unit), torch.empty_like(unit)
    best_gain = torch.zeros(unit.shape[1])
    best_scale = torch.full_like(best_gain, 1.0 / LOWEST)
    for position in _POSITIONS:
        torch.mul(unit, position, out=q).round_().clamp_(LOWEST, HIGHEST)
        overlap = torch.mul(q, weighted, out=product).sum(dim=0)
        power = q.mul_(q).mul_(share).sum(dim=0).clamp_(min=_TINY)
        scale = overlap / power
        gain = overlap.mul_(scale)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def signed_maximum(columns: torch.Tensor) -> torch.Tensor:
    """Return the value of largest magnitude, with its sign, of each column of [32, G]; the negative one on a tie."""
    high, low = columns.amax(dim=0), columns.amin(dim=0)
    return torch.where(high > -low, high, low)

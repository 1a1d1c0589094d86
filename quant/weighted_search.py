"""Choosing scales and levels of Q4_0 groups so that the weighted squared error is small.

In: a weight and how much each of its values matters. Out: `Q4Blocks`, never worse than the signed maximum over -8.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from generic_export.errors import WeightError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks

LOWEST, HIGHEST = -ZERO_POINT, 15 - ZERO_POINT

# Where the value of largest magnitude lands, in steps of the scale, before the scale is refitted. Negative positions use
# the free extra level at -8; beyond -8 and 7 that value is clipped, which pays when it matters little.
_POSITIONS = (-8.9, -8.6, -8.3, -8.0, -7.7, -7.4, -7.1, -6.8, -6.4, 6.4, 6.8, 7.1, 7.4, 7.7, 8.0, 8.3)

_CHUNK_VALUES = 1 << 16  # a handful of float32 buffers of this length stay in a core's cache
_REFITS = 2
_TINIEST_MAXIMUM = 1e-8  # below, every scale rounds to zero in float16
_LARGEST_SCALE = torch.finfo(torch.float16).max
_SMALLEST_IMPORTANCE = 1e-12  # relative to the largest of the group: no channel is ever free


def weighted_scale_search(weight: torch.Tensor, importance: torch.Tensor) -> Q4Blocks:
    """Choose scales and levels that minimise sum(importance * (weight - value)^2) in every group.

    Scales around the signed maximum are tried with both signs, each refitted in closed form for the levels it gives,
    d = sum(s w q) / sum(s q^2); the float16 scale is fixed before the final levels are chosen.

    Args:
        weight: float32 [..., K], K a multiple of 32.
        importance: non-negative float32, broadcastable to `weight`; only ratios within a group matter.

    Raises:
        WeightError: the weight holds inf or nan, or the importance nan, inf or negative values.
    """
    rows = weight.detach().to(torch.float32).reshape(-1, weight.shape[-1])
    shares = importance.detach().to(torch.float32).expand(weight.shape).reshape(rows.shape)
    levels = torch.empty((rows.numel() // GROUP, GROUP), dtype=torch.uint8)
    scales = torch.empty(len(levels), dtype=torch.float16)
    done = 0
    for values, wanted in _group_chunks(rows, shares):
        count = values.shape[1]
        q, d = _search_groups(values, wanted)
        levels[done : done + count].T.copy_(q.add_(ZERO_POINT))
        scales[done : done + count] = d
        done += count
    shape = (*weight.shape[:-1], weight.shape[-1] // GROUP)
    return Q4Blocks(levels.reshape(*shape, GROUP), scales.reshape(shape))


def nearest_levels(weight: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the levels, uint8 [..., K // 32, 32], nearest to float32 `weight` [..., K] for scales `d` [..., K // 32]."""
    groups = weight.unflatten(-1, (-1, GROUP))
    inverse = _inverse(d.to(torch.float32)).unsqueeze(-1)
    return (groups * inverse).round_().clamp_(LOWEST, HIGHEST).add_(ZERO_POINT).to(torch.uint8)


def _group_chunks(rows: torch.Tensor, shares: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of both as [32, groups], so that sums over a group are sums of whole vectors."""
    step = max(1, _CHUNK_VALUES // max(1, rows.shape[-1]))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        yield _as_columns(rows[piece]), _as_columns(shares[piece])


def _as_columns(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1, GROUP).T.contiguous()


def _search_groups(values: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float levels -8..7 [32, G] and float16 scales [G] for values [32, G]."""
    largest = _signed_maximum(values)
    alive = largest.abs() >= _TINIEST_MAXIMUM
    # Divided by the signed maximum, every group has its extreme at +1: candidates are the same numbers for all, and
    # squares neither overflow nor vanish.
    unit = values / torch.where(alive, largest, 1.0)
    root = _normalised_root(shares)
    scaled = unit * root
    best = _best_candidate(unit, root, scaled)
    best = _half(best * largest)
    return _polish(unit, root, scaled, largest, alive, best)


def _signed_maximum(values: torch.Tensor) -> torch.Tensor:
    high, low = values.amax(dim=0), values.amin(dim=0)
    largest = torch.where(high > -low, high, low)
    if not bool(largest.isfinite().all() & high.isfinite().all()):
        raise WeightError("a weight to quantise holds inf or nan.", "Quantise finite weights only.")
    return largest


def _normalised_root(shares: torch.Tensor) -> torch.Tensor:
    """Return the square root of the importance relative to each group's largest; ones where all of it is zero."""
    peak = shares.amax(dim=0)
    if not bool(peak.isfinite().all()) or bool((shares.amin(dim=0) < 0).any()):
        raise WeightError("importance of weights must be finite and not negative.", "Collect the statistics again.")
    relative = shares / torch.where(peak > 0, peak, 1.0)
    relative = torch.where(peak > 0, relative, 1.0)
    return relative.clamp_(min=_SMALLEST_IMPORTANCE).sqrt_()


def _best_candidate(unit: torch.Tensor, root: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """Return the refitted scale, relative to the signed maximum, of the candidate with the smallest error.

    For fixed levels the error is sum(s w^2) - (sum(s w q))^2 / sum(s q^2), so the largest subtrahend wins.
    """
    groups = unit.shape[1]
    best_gain, best_scale = torch.zeros(groups), torch.full((groups,), 1.0 / LOWEST)
    q, product = torch.empty_like(unit), torch.empty_like(unit)
    for position in _POSITIONS:
        torch.mul(unit, position, out=q)
        q.round_().clamp_(LOWEST, HIGHEST).mul_(root)
        power = torch.mul(q, q, out=product).sum(dim=0).clamp_(min=torch.finfo(torch.float32).tiny)
        overlap = torch.mul(q, scaled, out=product).sum(dim=0)
        scale = overlap / power
        gain = overlap * scale
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _polish(
    unit: torch.Tensor,
    root: torch.Tensor,
    scaled: torch.Tensor,
    largest: torch.Tensor,
    alive: torch.Tensor,
    found: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare stored forms: the signed maximum over -8, the scale found, and refits of the winner to its own levels."""
    d = _half(largest / LOWEST)
    q, error = _quantised(unit, root, scaled, largest, d)
    candidate = found
    for _ in range(1 + _REFITS):
        other_q, other_error = _quantised(unit, root, scaled, largest, candidate)
        better = other_error < error
        if not bool(better.any()):
            break
        q, error, d = (
            torch.where(better, other_q, q),
            torch.where(better, other_error, error),
            torch.where(better, candidate, d),
        )
        candidate = _refit(q, root, scaled, largest)
    d = torch.where(alive & d.isfinite(), d, torch.zeros_like(d))
    return torch.where(d != 0, q, torch.zeros_like(q)), d


def _quantised(
    unit: torch.Tensor, root: torch.Tensor, scaled: torch.Tensor, largest: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest levels for stored scales, and each group's error relative to its squared maximum."""
    stored = d.to(torch.float32)
    q = (unit * (largest * _inverse(stored))).round_().clamp_(LOWEST, HIGHEST)
    relative = stored / torch.where(largest != 0, largest, 1.0)
    difference = (q * relative).mul_(root).sub_(scaled)
    return q, difference.mul_(difference).sum(dim=0)


def _refit(q: torch.Tensor, root: torch.Tensor, scaled: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    weighted = q * root
    overlap = (weighted * scaled).sum(dim=0)
    power = weighted.mul_(weighted).sum(dim=0)
    return _half(torch.where(power > 0, overlap / power, 1.0 / LOWEST) * largest)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    return torch.where(d != 0, 1.0 / d, torch.zeros_like(d))


def _half(d: torch.Tensor) -> torch.Tensor:
    return d.clamp(-_LARGEST_SCALE, _LARGEST_SCALE).to(torch.float16)

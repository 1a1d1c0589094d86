"""Finding groups that already lie on a 16-level grid, so that they are stored without any loss.

In: a weight as a checkpoint holds it. Out: `Q4Blocks`, and which groups were on a grid: releases trained for 4 bits,
and checkpoints that were dequantised from a symmetric 4-bit format and saved as f16, bf16 or f32.
"""

from __future__ import annotations

import torch

from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.weighted_search import HIGHEST, LOWEST

# bf16 moves a value by up to 2^-8 of it; the float16 scale and its fit add a little. A group within this distance loses
# nothing that the checkpoint still knew, and 32 values do not come so close by chance.
_BFLOAT16_ROUNDING = 2.0**-8
_RELATIVE_NOISE = 1.25 * _BFLOAT16_ROUNDING

_CHUNK_GROUPS = 1 << 14
_PROBES = slice(0, GROUP, 8)  # four values of a group refuse almost every grid that does not fit
_EXTREME_LEVELS = tuple(level for level in range(LOWEST, HIGHEST + 1) if level)


def lattice_blocks(weight: torch.Tensor) -> tuple[Q4Blocks, torch.Tensor]:
    """Find the groups whose values are integer multiples, -8 to 7, of one scale, but for storage noise.

    Args:
        weight: float32 [..., K], K a multiple of 32.

    Returns:
        Blocks (d = 0 and q = 8 in groups that are on no grid), and bool [..., K // 32]: which groups are.
        All-zero groups count as found.
    """
    groups = weight.detach().to(torch.float32).reshape(-1, GROUP)
    levels = torch.full(groups.shape, ZERO_POINT, dtype=torch.uint8)
    scales = torch.zeros(len(groups), dtype=torch.float16)
    found = torch.zeros(len(groups), dtype=torch.bool)
    for start in range(0, len(groups), _CHUNK_GROUPS):
        piece = slice(start, start + _CHUNK_GROUPS)
        _search_chunk(groups[piece], levels[piece], scales[piece], found[piece])
    shape = (*weight.shape[:-1], weight.shape[-1] // GROUP)
    return Q4Blocks(levels.reshape(*shape, GROUP), scales.reshape(shape)), found.reshape(shape)


def keep_lattice(weight: torch.Tensor, blocks: Q4Blocks) -> Q4Blocks:
    """Return `blocks` with the groups of float32 `weight` [..., K] that lie on a grid stored as that grid."""
    exact, found = lattice_blocks(weight)
    if not bool(found.any()):
        return blocks
    return Q4Blocks(torch.where(found.unsqueeze(-1), exact.q, blocks.q), torch.where(found, exact.d, blocks.d))


def _search_chunk(groups: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, found: torch.Tensor) -> None:
    """Fill in the results of one chunk, in place."""
    high, low = groups.amax(dim=1), groups.amin(dim=1)
    largest = torch.where(high > -low, high, low)
    found |= largest == 0
    probes = groups[:, _PROBES].contiguous()
    error = torch.full((len(groups),), torch.inf)
    for level in _EXTREME_LEVELS:
        fits = _fits(probes, largest / level)
        rows = fits.nonzero().squeeze(1)
        if not len(rows):
            continue
        q, d, misfit = _fit_grid(groups[rows], largest[rows] / level)
        better = misfit < error[rows]
        rows, q, d = rows[better], q[better], d[better]
        error[rows] = misfit[better]
        levels[rows] = (q + ZERO_POINT).to(torch.uint8)
        scales[rows] = d
        found[rows] = True


def _fits(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    steps = values / scale.unsqueeze(1)
    nearest = steps.round().clamp_(LOWEST, HIGHEST)
    # Twice the noise: the scale comes from one value and carries its own.
    return ((steps - nearest).abs_() <= steps.abs() * (2 * _RELATIVE_NOISE)).all(dim=1)


def _fit_grid(groups: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels, the float16 scale refitted to them, and the squared misfit: inf where a value is off the grid."""
    q = (groups / scale.unsqueeze(1)).round_().clamp_(LOWEST, HIGHEST)
    ratios = groups / torch.where(q != 0, q, torch.nan)
    d = ratios.nanmean(dim=1).to(torch.float16)  # noise is relative: every non-zero value tells as much of the scale
    misfit = _misfit(groups, q, d)
    # The scales that explain every rounding to bf16 form a narrow interval, which tells more than the mean does.
    low = (ratios - ratios.abs() * _BFLOAT16_ROUNDING).nan_to_num(nan=-torch.inf).amax(dim=1)
    high = (ratios + ratios.abs() * _BFLOAT16_ROUNDING).nan_to_num(nan=torch.inf).amin(dim=1)
    narrowed = ((low + high) / 2).to(torch.float16)
    is_bfloat16 = (groups.to(torch.bfloat16).to(torch.float32) == groups).all(dim=1)
    use = is_bfloat16 & (misfit > 0) & _misfit(groups, q, narrowed).isfinite()
    d = torch.where(use, narrowed, d)
    return q, d, _misfit(groups, q, d)


def _misfit(groups: torch.Tensor, q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    difference = (q * d.to(torch.float32).unsqueeze(1) - groups).abs_()
    on_grid = (difference <= groups.abs() * _RELATIVE_NOISE).all(dim=1) & d.isfinite() & (d != 0)
    relative = difference.div_(groups.abs().amax(dim=1, keepdim=True)).square_().sum(dim=1)
    return torch.where(on_grid, relative, torch.inf)

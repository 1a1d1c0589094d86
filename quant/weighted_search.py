"""Choosing scales and levels of Q4_0 groups so that the weighted squared error is small.

In: a weight and how much each of its values matters. Out: `Q4Blocks`, never worse than the signed maximum over -8.
"""

from __future__ import annotations

import torch

from generic_export.errors import WeightError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks

LOWEST, HIGHEST = -ZERO_POINT, 15 - ZERO_POINT


def weighted_scale_search(weight: torch.Tensor, importance: torch.Tensor | None = None) -> Q4Blocks:
    """Choose scales and levels that minimise sum(importance * (weight - value)^2) in every group.

    Scales around the signed maximum are tried with both signs, each refitted in closed form for the levels it gives,
    d = sum(s w q) / sum(s q^2); the float16 scale is fixed before the final levels are chosen.

    Args:
        weight: float [..., K], K a multiple of 32; computed with in float32.
        importance: non-negative, broadcastable to `weight`; only ratios within a group matter. Without it each value
            matters as much as it is large.

    Raises:
        WeightError: the weight holds inf or nan, or the importance nan, inf or negative values.
    """
    # Here, because the compiler takes 0.3 s to import, and most commands quantise nothing.
    from quant.scale_kernel import BAD_IMPORTANCE, BAD_WEIGHT, search_scales

    matrices = _matrices(weight.detach())
    shares = [None] * len(matrices) if importance is None else _matrices(importance.detach().expand(weight.shape))
    groups_of_one = matrices[0].numel() // GROUP if len(matrices) else 0
    levels = torch.empty((len(matrices), groups_of_one, GROUP), dtype=torch.uint8)
    scales = torch.empty((len(matrices), groups_of_one), dtype=torch.float32)
    for matrix, share, q, d in zip(matrices, shares, levels, scales, strict=True):
        status = search_scales(matrix.numpy(), None if share is None else share.numpy(), q.numpy(), d.numpy())
        if status == BAD_WEIGHT:
            raise WeightError("a weight to quantise holds inf or nan.", "Quantise finite weights only.")
        if status == BAD_IMPORTANCE:
            raise WeightError("importance of weights must be finite and not negative.", "Collect the statistics again.")
    shape = (*weight.shape[:-1], weight.shape[-1] // GROUP)
    return Q4Blocks(levels.reshape(*shape, GROUP), scales.reshape(shape).to(torch.float16))


def nearest_levels(weight: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the levels, uint8 [..., K // 32, 32], nearest to float32 `weight` [..., K] for scales `d` [..., K // 32]."""
    groups = weight.unflatten(-1, (-1, GROUP))
    stored = d.to(torch.float32)
    inverse = torch.where(stored != 0, 1.0 / stored, torch.zeros_like(stored)).unsqueeze(-1)
    return (groups * inverse).round_().clamp_(LOWEST, HIGHEST).add_(ZERO_POINT).to(torch.uint8)


def _matrices(tensor: torch.Tensor) -> torch.Tensor:
    """Return float32 [matrices, rows, K]; rows that a broadcast repeats are not copied."""
    rows = tensor.unsqueeze(0) if tensor.dim() == 1 else tensor
    return rows.to(torch.float32).reshape(-1, *rows.shape[-2:])

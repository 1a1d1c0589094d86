"""Finding groups that already lie on a 16-level grid, so that they are stored without any loss.

In: a weight as a checkpoint holds it. Out: `Q4Blocks`, and which groups were on a grid: releases trained for 4 bits,
and checkpoints that were dequantised from a symmetric 4-bit format and saved as f16, bf16 or f32.
"""

from __future__ import annotations

import torch

from quant.blocks import GROUP, Q4Blocks
from quant.weighted_search import nearest_levels, not_finite, stored_words


def lattice_blocks(weight: torch.Tensor) -> tuple[Q4Blocks, torch.Tensor]:
    """Find the groups whose values are integer multiples, -8 to 7, of one scale, but for storage noise.

    Args:
        weight: float [..., K], K a multiple of 32.

    Returns:
        Blocks (d = 0 and q = 8 in groups that are on no grid), and bool [..., K // 32]: which groups are.
        All-zero groups count as found.

    Raises:
        WeightError: the weight holds inf or nan.
    """
    # Here, because the compiler takes 0.3 s to import, and most commands quantise nothing.
    from quant.block_kernel import BAD_WEIGHT, find_grids
    from quant.lanes import new_lanes

    scales = torch.empty((*weight.shape[:-1], weight.shape[-1] // GROUP), dtype=torch.float32)
    if find_grids(new_lanes(), *stored_words(weight), scales.view(-1).numpy()) == BAD_WEIGHT:
        raise not_finite()
    values = weight.detach().to(torch.float32)
    found = (scales != 0) | (values.unflatten(-1, (-1, GROUP)) == 0).all(dim=-1)
    return Q4Blocks(nearest_levels(values, scales), scales.to(torch.float16)), found

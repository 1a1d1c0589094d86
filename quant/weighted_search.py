"""Choosing scales and levels of Q4_0 groups so that the weighted squared error is small.

In: a weight and how much each of its values matters. Out: `Q4Blocks` or packed rows, never worse than the signed maximum
over -8.
"""

from __future__ import annotations

import numpy as np
import torch

from generic_export.errors import WeightError
from quant.blocks import BLOCK_BYTES, GROUP, ZERO_POINT, Q4Blocks
from quant.packing import unpack_q4_0
from quant.protocol import PackedRows

LOWEST, HIGHEST = -ZERO_POINT, 15 - ZERO_POINT

_NO_LONG = np.empty(0, np.uint32)
_NO_SHORT = np.empty(0, np.uint16)
_NO_IMPORTANCE = np.empty(0, np.float32)


def weighted_scale_search(
    weight: torch.Tensor, importance: torch.Tensor | None = None, *, keep_grids: bool = False
) -> Q4Blocks:
    """Choose scales and levels that minimise sum(importance * (weight - value)^2) in every group.

    Scales around the signed maximum are tried with both signs, each refitted in closed form for the levels it gives,
    d = sum(s w q) / sum(s q^2); the float16 scale is fixed before the final levels are chosen.

    Args:
        weight: float [..., K], K a multiple of 32; computed with in float32.
        importance: non-negative, broadcastable to `weight`; only ratios within a group matter. Without it each value
            matters as much as it is large.
        keep_grids: store groups that lie on a grid of 16 levels already as that grid (`quant.gptq.lattice_blocks`).

    Raises:
        WeightError: the weight holds inf or nan, or the importance nan, inf or negative values.
    """
    columns = weight.shape[-1]
    shares = None if importance is None else importance.detach().expand(weight.shape).reshape(-1, columns)
    packed = search_rows(weight.detach().reshape(-1, columns), shares, keep_grids=keep_grids)
    blocks = unpack_q4_0(packed.data)
    shape = (*weight.shape[:-1], columns // GROUP)
    return Q4Blocks(blocks.q.reshape(*shape, GROUP), blocks.d.reshape(shape))


def search_rows(rows: torch.Tensor, importance: torch.Tensor | None = None, *, keep_grids: bool = True) -> PackedRows:
    """Choose as `weighted_scale_search` does, in one pass from values as they are stored to packed blocks.

    Args:
        rows: float [rows, K], K a multiple of 32; bf16, f16 and f32 are read as they are.
        importance: float [rows, K] or [K].
        keep_grids: as there.

    Raises:
        WeightError: as there.
    """
    # Here, because the compiler takes 0.3 s to import, and most commands quantise nothing.
    from quant.block_kernel import BAD_IMPORTANCE, BAD_WEIGHT, quantize_groups
    from quant.lanes import new_lanes

    count, columns = rows.shape
    short, long, kind = stored_words(rows)
    matters, row_step = _importance_words(importance, count, columns)
    packed = torch.empty((count, columns // GROUP * BLOCK_BYTES), dtype=torch.uint8)
    sums = np.zeros(2)
    words = packed.view(-1).numpy().view(np.uint16)
    status = quantize_groups(new_lanes(), short, long, kind, matters, columns, row_step, keep_grids, words, sums)
    if status == BAD_WEIGHT:
        raise not_finite()
    if status == BAD_IMPORTANCE:
        raise WeightError("importance of weights must be finite and not negative.", "Collect the statistics again.")
    return PackedRows(packed, squared_error=float(sums[0]), energy=float(sums[1]))


def prepare_search() -> None:
    """Compile the search (some seconds, once for each installation), or load it compiled."""
    search_rows(torch.zeros(1, GROUP))


def nearest_levels(weight: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the levels, uint8 [..., K // 32, 32], nearest to float32 `weight` [..., K] for scales `d` [..., K // 32]."""
    groups = weight.unflatten(-1, (-1, GROUP))
    stored = d.to(torch.float32)
    inverse = torch.where(stored != 0, 1.0 / stored, torch.zeros_like(stored)).unsqueeze(-1)
    return (groups * inverse).round_().clamp_(LOWEST, HIGHEST).add_(ZERO_POINT).to(torch.uint8)


def stored_words(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the memory of float values as `quant.block_kernel` takes it: words of 16 bits, words of 32, which it is."""
    from quant.block_kernel import BFLOAT16, FLOAT16, FLOAT32

    flat = values.detach().reshape(-1)
    if flat.dtype in (torch.bfloat16, torch.float16):
        kind = BFLOAT16 if flat.dtype == torch.bfloat16 else FLOAT16
        return flat.contiguous().view(torch.uint16).numpy(), _NO_LONG, kind
    return _NO_SHORT, flat.to(torch.float32).contiguous().view(torch.uint32).numpy(), FLOAT32


def not_finite() -> WeightError:
    """Return the error for a weight without a quantised form."""
    return WeightError("a weight to quantise holds inf or nan.", "Quantise finite weights only.")


def _importance_words(importance: torch.Tensor | None, count: int, columns: int) -> tuple[np.ndarray, int]:
    """Return importance as a flat array, and the step from one row's to the next one's; rows that share one do not repeat it."""
    if importance is None:
        return _NO_IMPORTANCE, 0
    rows = importance.detach().to(torch.float32).expand(count, columns)
    if rows.stride(0) == 0:
        return rows[0].contiguous().numpy(), 0
    return rows.contiguous().view(-1).numpy(), columns

"""tract's attention operator with keys and values padded, so that its CUDA kernel never needs the tile that it reads too early.

The kernel (flash_attn.cu, tract 0.23.9) does not wait for the last tile of V. Behind 64 rows of padding, the last full tile and the
tail tile are both padding, whose weights are zero. The mask hides the padding, so the operator cannot be causal itself.
"""

from __future__ import annotations

import sympy
import torch

from generic_export.nnef.attention_forms import PADDING_ROWS
from generic_export.ops.attention import HIDDEN, attention_operator, causal_mask
from generic_export.ops.indexing import arange
from generic_export.torch_graph.dims import Dim, same_dim, same_shape, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value

HEAD_SIZES = (64, 128)
"""Sizes of heads that tract's CUDA kernel is compiled for (cuda/src/transform.rs); others become primitive operators."""


def takes_padding(b: NnefBuilder, query: Value, key: Value, value: Value) -> bool:
    """Say whether attention over these heads is to be the padded operator.

    Args:
        query: [B, H, S, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, Dv].
    """
    spelling = b.spelling
    half = query.dtype is torch.float16 or spelling.attention_in_f16
    kernel = same_shape(key.shape, value.shape) and any(same_dim(key.shape[-1], size) for size in HEAD_SIZES)
    return spelling.attention_padding and half and kernel and not b.numerics.f32_attention


def padded_attention(
    b: NnefBuilder, query: Value, key: Value, value: Value, mask: Value | None, scale: float, *, is_causal: bool
) -> Value:
    """Emit tract's operator on f16 heads, keys and values padded by rows of zeros that the mask hides.

    Args:
        query: [B, H, S, D].
        key, value: [B, Hkv, T, D].
        mask: bool, broadcastable to [B, H, S, T], True where a query may look; None with `is_causal`, or where all is seen.
        scale: factor of the scores.
        is_causal: query i sees keys up to T - S + i.

    Returns:
        f16 [B, H, S, D].
    """
    half = torch.float16
    rows = b.full((*key.shape[:2], PADDING_ROWS, key.shape[-1]), 0.0, half)
    keys, values = (b.concat([b.cast(heads, half), rows], 2) for heads in (key, value))
    additive = _additive_mask(b, mask, query.shape[-2], key.shape[-2], is_causal=is_causal)
    return attention_operator(b, b.cast(query, half), keys, values, additive, scale, is_causal=False)


def _additive_mask(b: NnefBuilder, mask: Value | None, steps: Dim, total: Dim, *, is_causal: bool) -> Value:
    """Return f16 [B or 1, H or 1, S, T + 64]: 0 where a query may look, and f16's lowest number elsewhere and on the padding."""
    padded = simplify_dim(sympy.sympify(total) + PADDING_ROWS)
    if mask is not None:
        full = b.broadcast(mask, (*mask.shape[:-2], steps, total))
        hidden = b.full((*mask.shape[:-2], steps, PADDING_ROWS), HIDDEN, torch.float16)
        return b.concat([_as_numbers(b, full), hidden], 3)
    if is_causal:
        past = simplify_dim(sympy.sympify(total) - sympy.sympify(steps))
        return _as_numbers(b, causal_mask(b, steps, padded, past=past))
    places = b.unsqueeze(arange(b, 0, padded), [0, 1, 2])
    seen = b.binary("lt", places, b.scalar(sympy.sympify(total), torch.int64), dtype=torch.bool)
    return _as_numbers(b, b.broadcast(seen, (1, 1, steps, padded)))


def _as_numbers(b: NnefBuilder, seen: Value) -> Value:
    chosen = b.select(seen, b.scalar(0.0, torch.float32), b.scalar(HIDDEN, torch.float32))
    return b.cast(chosen, torch.float16)


__all__ = ["HEAD_SIZES", "padded_attention", "takes_padding"]

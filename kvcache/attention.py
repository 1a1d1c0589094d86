"""Attention as one operator with the engine's meaning: grouped-query heads not repeated, causal at the bottom right.

`explicit_attention()` makes transformers call it, through its own attention and mask interfaces, inside a `with` block;
the translation below writes it as `tract_transformers_sdpa`, or spelled out where that operator has no such variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError
from generic_export.ops.attention import additive_mask, causal_mask, engine_attention, spelled_out_attention
from generic_export.ops.builder import NnefBuilder, Value
from generic_export.ops.registry import translates

ATTENTION_NAME = "t2n_explicit"
"""The name under which transformers knows our attention while `explicit_attention()` is entered."""


@torch.library.custom_op("t2n::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """Scaled dot-product attention over all cached positions.

    Args:
        query: [B, H, S, D] float.
        key: [B, Hkv, T, D]; H is a multiple of Hkv, head h reads key head h // (H / Hkv).
        value: [B, Hkv, T, Dv].
        mask: bool, broadcastable to [B, H, S, T]; True where a query may look. None when `is_causal` says it all.
        scale: factor of the scores.
        is_causal: query i sees keys up to T - S + i (the queries are the last S positions).
        softcap: scores become softcap * tanh(scores / softcap) before the mask, when given.

    Returns:
        [B, H, S, Dv], in the element type of `query`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        steps, total = scores.shape[-2:]
        allowed = torch.ones(steps, total, dtype=torch.bool, device=scores.device).tril(total - steps)
        mask = allowed if mask is None else mask & allowed
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (torch.softmax(scores, dim=-1).to(value.dtype) @ value).to(query.dtype)


@attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


# --- transformers' side --------------------------------------------------------------------------


@contextmanager
def explicit_attention() -> Iterator[str]:
    """Register our attention with transformers for the length of the block, and yield its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The class-wide tables: masking_utils looks only there (AttentionMaskInterface._global_mapping).
    tables = (type(ALL_ATTENTION_FUNCTIONS)._global_mapping, type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping)
    tables[0][ATTENTION_NAME] = _attention_forward
    tables[1][ATTENTION_NAME] = _attention_mask
    try:
        yield ATTENTION_NAME
    finally:
        for table in tables:
            table.pop(ATTENTION_NAME, None)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' AttentionInterface signature; returns [B, S, H, Dv] and no weights."""
    if s_aux is not None:
        raise CaptureError(f"{type(module).__name__}: attention sinks have no translation yet.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    result = torch.ops.t2n.attention(
        query, key, value, attention_mask, scale, bool(causal) and attention_mask is None, softcap
    )
    return result.transpose(1, 2).contiguous(), None


def _attention_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """transformers' AttentionMaskInterface signature; None for the plain causal mask, else bool [1, 1, S, T]."""
    from transformers.masking_utils import causal_mask_function

    if attention_mask is not None:
        raise CaptureError("a padding mask has no place in an exported decoder: it takes no attention_mask input.")
    if mask_function is None or mask_function is causal_mask_function:
        return None
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    queries = (torch.arange(q_length, device=device) + q_offset)[None, None, :, None]
    keys = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    return mask_function(zero, zero, queries, keys).expand(-1, -1, q_length, kv_length)


# --- tract's side ----------------------------------------------------------------------------------


@translates(torch.ops.t2n.attention.default)
def translate_attention(
    b: NnefBuilder,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    scale: float,
    is_causal: bool,
    softcap: float | None,
) -> Value:
    """t2n::attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool is_causal, float? softcap)"""
    dtype = query.dtype
    if b.numerics.f32_attention:
        query, key, value = (b.cast(tensor, torch.float32) for tensor in (query, key, value))
    steps, total = query.shape[-2], key.shape[-2]
    if softcap is None:
        additive = None if mask is None else additive_mask(b, mask, steps, total)
        result = engine_attention(b, query, key, value, additive, scale, is_causal=is_causal)
    else:
        if is_causal:
            mask = causal_mask(b, steps, total)
        additive = None if mask is None else additive_mask(b, mask, steps, total)
        result = spelled_out_attention(b, query, key, value, additive, scale, softcap)
    return b.cast(result, dtype)

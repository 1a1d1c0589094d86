"""Families whose attention is written for lengths that a graph cannot have: their forwards in terms of our operator.

In: nothing. Out: `explicit_attention_families()`, inside which the classes of those families call `t2n::attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from generic_export.ops.attention import HIDDEN
from kvcache.attention import compressed
from kvcache.attention.blocks import minimax_m3_keys, minimax_m3_mask, qwen4_keys
from kvcache.attention.funnel import position_embeds
from kvcache.attention.global_tokens import (
    blockwise_attention,
    led_encoder,
    longformer,
    repeated_molecules,
    windowed_attention,
)
from kvcache.attention.hyper_connections import mixing_weights
from kvcache.compat import family_class, takes_cache

# (family, class, method) -> what stands in its place
Forwards = Mapping[tuple[str, str, str], Callable[..., Any]]


@contextmanager
def replaced_forwards(forwards: Forwards) -> Iterator[None]:
    """Put functions in the place of methods of transformers' classes, those it has, for the length of the block."""
    with ExitStack() as stack:
        for (family, owner, method), ours in forwards.items():
            if (found := family_class(family, owner)) is not None:
                stack.enter_context(mock.patch.object(found, method, ours))
        yield


@contextmanager
def registered(table: dict[str, Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Enter a function in one of transformers' tables for the length of the block; what stood there comes back."""
    before = table.get(name)
    table[name] = function
    try:
        yield
    finally:
        if before is None:
            table.pop(name, None)
        else:
            table[name] = before


@contextmanager
def explicit_attention_families() -> Iterator[None]:
    """Let the families below call our attention for the length of the block."""
    with replaced_forwards(_FORWARDS), _hyper_connections():
        yield


@contextmanager
def _hyper_connections() -> Iterator[None]:
    """Let DeepSeek-V4 normalize its mixing matrices in one operator."""
    owner = ("deepseek_v4", "DeepseekV4HyperConnection")
    found = family_class(*owner)
    own = found.forward if found is not None else None
    # The block may be entered twice: the function that stands there then is ours already.
    forwards = {} if own is None or hasattr(own, "__wrapped__") else {(*owner, "forward"): mixing_weights(own)}
    with replaced_forwards(forwards):
        yield


@takes_cache
def _mpt_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """MPT: the bias is cut out of a table as long as the longest sequence; here it is computed for the length there is.

    In: `attention_mask` bool [B, 1, S, T], True where a query may not look; of one text with a cache it is the causal one.
    """
    batch, steps = hidden_states.shape[:2]
    joined = self.Wqkv(hidden_states)
    if self.clip_qkv:
        joined = joined.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        each.reshape(batch, steps, self.n_heads, self.head_dim).transpose(1, 2) for each in joined.chunk(3, dim=2)
    )
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    total = key.shape[2]
    # ALiBi (Press et al. 2022): slope * distance; the table's entry one before the last is that of the distance 1.
    slopes = -position_bias[:, 0, position_bias.shape[2] - 2]
    distance = torch.arange(1 - total, 1, device=key.device)[None, None, None, :]
    bias = (slopes[None, :, None, None] * distance).expand(-1, -1, steps, -1)
    alone = cache is not None and isinstance(batch, int) and batch == 1
    causal = attention_mask is None or alone
    if attention_mask is not None and not alone:
        bias = bias.masked_fill(attention_mask, HIDDEN)
    mixed = torch.ops.t2n.attention(query, key, value, bias, self.softmax_scale, causal, None, None)
    return self.out_proj(mixed.transpose(1, 2).reshape(batch, steps, self.hidden_size)), None


def _fsmt_attention(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    layer_state: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """FSMT, [S, B, D]: with a cache its decoder reads one token at a time and has no causal mask; here it may read several.

    In: `key_padding_mask` bool [B, T], True where a key is padding.
    """
    steps, batch, width = query.shape
    crosses = self.encoder_decoder_attention
    causal = layer_state is not None and not crosses

    def heads(states: torch.Tensor) -> torch.Tensor:
        return states.reshape(-1, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    if crosses and layer_state is not None and layer_state.is_updated.get(self.layer_idx):
        said = layer_state.cross_attention_cache.layers[self.layer_idx]
        keys, values = said.keys, said.values
    else:
        read = key if crosses else query
        keys, values = heads(self.k_proj(read)), heads(self.v_proj(read))
        if layer_state is not None:
            cache = layer_state.cross_attention_cache if crosses else layer_state.self_attention_cache
            keys, values = cache.update(keys, values, self.layer_idx)
    if crosses and layer_state is not None:
        layer_state.is_updated[self.layer_idx] = True
    mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
    mixed = torch.ops.t2n.attention(heads(self.q_proj(query)), keys, values, mask, self.scaling, causal, None, None)
    return self.out_proj(mixed.permute(2, 0, 1, 3).reshape(steps, batch, width)), None


_FORWARDS: Forwards = {
    ("fsmt", "Attention", "forward"): _fsmt_attention,
    ("canine", "CanineAttention", "forward"): blockwise_attention,
    ("canine", "CanineModel", "_repeat_molecules"): repeated_molecules,
    ("funnel", "FunnelAttentionStructure", "get_position_embeds"): position_embeds,
    ("led", "LEDEncoder", "forward"): led_encoder,
    ("led", "LEDEncoderSelfAttention", "forward"): windowed_attention,
    ("longformer", "LongformerModel", "forward"): longformer,
    ("longformer", "LongformerSelfAttention", "forward"): windowed_attention,
    ("mpt", "MptAttention", "forward"): _mpt_attention,
    ("deepseek_v4", "DeepseekV4Attention", "forward"): compressed.attention,
    ("deepseek_v4", "DeepseekV4HCACompressor", "forward"): compressed.heavily_compressed,
    ("deepseek_v4", "DeepseekV4CSACompressor", "forward"): compressed.sparsely_compressed,
    ("deepseek_v4", "DeepseekV4Indexer", "forward"): compressed.chosen_entries,
    ("minimax_m3_vl", "MiniMaxM3VLIndexer", "forward"): minimax_m3_keys,
    ("minimax_m3_vl", "MiniMaxM3VLIndexer", "build_block_mask"): minimax_m3_mask,
    ("qwen4_exp", "Qwen4ExpTextQSAIndexer", "forward"): qwen4_keys,
}

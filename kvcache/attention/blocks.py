"""Attention that looks at the best blocks of keys only (MiniMax-M3, Qwen4-exp, GLM-5 Next): which ones, of any length.

In: what a family's indexer takes. Out: which keys each query may see, bool. transformers counts blocks in loops over tokens, or
divides by their number; here each query scores every block, and what is not to be chosen has a score that says so.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kvcache.compat import takes_cache

# Scores beyond any that a model computes: not to be chosen, and to be chosen in any case. Infinities are lost in tract's maxima.
NEVER, ALWAYS = -1e30, 1e30


@takes_cache
def minimax_m3_keys(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """MiniMax-M3: `MiniMaxM3VLIndexer.forward`, which returns the keys [B, H, S, T] themselves instead of indices of blocks."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

    batch, steps, _ = hidden_states.shape
    query = self.q_norm(self.q_proj(hidden_states).view(batch, steps, -1, self.head_dim)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(batch, steps, 1, self.head_dim)).transpose(1, 2)
    cos, sin = (table[..., : self.head_dim] for table in position_embeddings)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    if cache is not None:
        key = cache.layers[self.layer_idx].update_index(key)
    total = key.shape[2]
    visible = torch.arange(total, device=key.device)[None, None, None, :] <= position_ids[:, None, :, None]
    scores = (query.float() @ key.float().transpose(-1, -2)).masked_fill(~visible, NEVER)
    blocks = whole_blocks(scores, -1, self.block_size, NEVER).amax(dim=-1)
    number = torch.arange(blocks.shape[-1], device=key.device)[None, None, None, :]
    own = (position_ids // self.block_size)[:, None, :, None]
    local = (number <= own) & (number > own - self.local_blocks)
    chosen = best(blocks.masked_fill(local, ALWAYS), self.topk_blocks)
    return _keys_of(chosen, self.block_size, total) & visible


def minimax_m3_mask(
    self: Any, keys: torch.Tensor, attention_mask: torch.Tensor | None, _: Any, dtype: torch.dtype, *__: Any
) -> torch.Tensor:
    """MiniMax-M3: `MiniMaxM3VLIndexer.build_block_mask` of what `minimax_m3_keys` returns; added to the scores."""
    keys = keys.repeat_interleave(self.config.num_attention_heads // keys.shape[1], dim=1)
    if attention_mask is not None:
        keys = keys & (attention_mask if attention_mask.dtype is torch.bool else attention_mask == 0)
    return _added_to_scores(keys, dtype)


@takes_cache
def qwen4_keys(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """Qwen4-exp: `Qwen4ExpTextQSAIndexer.forward` for texts without padding; keys [B, 1, S, T].

    A query sees the tokens after its last whole block, and the best of the whole blocks up to it.
    """
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    batch, steps, _ = hidden_states.shape
    cos, sin = position_embeddings  # of all positions
    total, size = attention_mask.shape[-1], self.compress_ratio
    query_width = self.index_n_heads * self.index_head_dim
    query, key = torch.split(self.index_qk_proj(hidden_states), [query_width, self.index_head_dim], dim=-1)
    query = self.q_layernorm(query.reshape(batch, steps, self.index_n_heads, self.index_head_dim))
    query = apply_rotary_pos_emb(query, cos=cos[:, total - steps :], sin=sin[:, total - steps :], unsqueeze_dim=2)
    if cache is not None:
        key = cache.update_indexer(key, self.layer_idx)
    pooled = self.k_layernorm(whole_blocks(key, 1, size, 0.0).float().mean(dim=2).to(key.dtype))
    starts = [whole_blocks(table, 1, size, 0.0)[:, :, 0] for table in (cos, sin)]
    pooled = apply_rotary_pos_emb(pooled.unsqueeze(2), cos=starts[0], sin=starts[1], unsqueeze_dim=2).squeeze(2)
    scores = query.float().transpose(1, 2) @ pooled.float().transpose(1, 2).unsqueeze(1)
    scores = torch.relu(scores).sum(dim=1) / math.sqrt(self.index_head_dim)
    return _keys_of_whole_blocks(scores, size, total, self.block_topk, tail=True).unsqueeze(1)


@takes_cache
def glm5_keys(
    self: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, attention_mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """GLM-5 Next: `Glm5NextTextIndexer.forward` for texts without padding, which returns the keys [B, 1, S, T] themselves.

    A query sees the best of the whole pools up to it, and the tokens after the last of these, if the config says so.
    """
    batch, steps, _ = hidden_states.shape
    size = self.index_kpool
    query = self.wq_b(q_resid).view(batch, steps, -1, self.head_dim).transpose(1, 2)
    key = self.k_norm(self.wk(hidden_states))
    gates = torch.nn.functional.linear(hidden_states, self.index_kpool_compress_gate)
    packed = torch.cat([key, gates, attention_mask.to(key.dtype)[..., None]], dim=-1)
    if cache is not None:
        packed = cache.update_indexer(packed, self.layer_idx)
    total = packed.shape[1]
    keys, gates = (whole_blocks(part, 1, size, 0.0) for part in packed[..., :-1].split(self.head_dim, dim=-1))
    shares = (gates.float() + self.index_kpool_compress_ape.float()).softmax(dim=2).to(keys.dtype)
    pooled = (shares * keys).sum(dim=2)
    scores = torch.relu(query.float() @ pooled.float().transpose(1, 2).unsqueeze(1) * self.softmax_scale)
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
    scores = (scores * weights.transpose(1, 2).unsqueeze(-1)).sum(dim=1)
    keys_seen = _keys_of_whole_blocks(
        scores, size, total, self.index_topk // size, tail=self.index_kpool_always_select_tail
    )
    return keys_seen.unsqueeze(1)


def glm5_mask(_: Any, topk_indices: torch.Tensor, query_states: torch.Tensor, kv_length: int) -> torch.Tensor:
    """GLM-5 Next: `Glm5NextTextAttention.build_attention_mask_from_topk` of what `glm5_keys` returns; added to the scores."""
    del kv_length
    return _added_to_scores(topk_indices, query_states.dtype)


def _added_to_scores(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 for keys that are looked at, the least number of the type for others."""
    return torch.zeros(keys.shape, dtype=dtype, device=keys.device).masked_fill(~keys, torch.finfo(dtype).min)


def _keys_of_whole_blocks(scores: torch.Tensor, size: int, total: int, count: int, *, tail: bool) -> torch.Tensor:
    """Return the keys [B, S, T] of the best whole blocks up to each of the last queries.

    Args:
        scores: of each block, [B, S, ceil(T / size)].
        size: of a block.
        total: T.
        count: of blocks.
        tail: the tokens after a query's last whole block too, up to it.
    """
    steps = scores.shape[1]
    # How many tokens a query may look at.
    seen = (torch.arange(total - steps, total, device=scores.device) + 1)[None, :, None]
    number = torch.arange(scores.shape[-1], device=scores.device)[None, None, :]
    chosen = best(scores.masked_fill((number + 1) * size > seen, NEVER), count)
    keys = _keys_of(chosen, size, total)
    if not tail:
        return keys
    token = torch.arange(total, device=scores.device)[None, None, :]
    return keys | ((token >= seen // size * size) & (token < seen))


def whole_blocks(tensor: torch.Tensor, axis: int, size: int, filler: float) -> torch.Tensor:
    """Split an axis [T] into blocks [ceil(T / size), size], the last one filled up."""
    axis %= tensor.ndim
    count = (tensor.shape[axis] + size - 1) // size
    shape = [*tensor.shape]
    more = tensor.new_full((*shape[:axis], size, *shape[axis + 1 :]), filler)
    filled = torch.cat([tensor, more], dim=axis).narrow(axis, 0, count * size)
    return filled.reshape(*shape[:axis], count, size, *shape[axis + 1 :])


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Say which of the last axis are the best `count`, all of them where there are fewer; never those scored `NEVER`."""
    blocks = scores.shape[-1]
    scores = torch.cat([scores, scores.new_full((*scores.shape[:-1], count), NEVER)], dim=-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count, dim=-1).indices, True)
    return (chosen & (scores > NEVER / 2))[..., :blocks]


def _keys_of(blocks: torch.Tensor, size: int, total: int) -> torch.Tensor:
    """Return what is said of blocks [..., N] for each of the first `total` keys in them."""
    each = blocks.unsqueeze(-1).expand(*blocks.shape, size)
    return each.reshape(*blocks.shape[:-1], blocks.shape[-1] * size)[..., :total]

"""DeepSeek-V4: keys of a window beside entries that stand for several tokens each, made anew at every call.

transformers keeps the entries, and what does not fill one yet: states that grow every few tokens. A graph has none such, so
a layer keeps what all its entries are made of, a row for each token (`kvcache.states.explicit_cache`), and every call makes
the entries.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcache.attention.blocks import NEVER, best, whole_blocks
from kvcache.compat import takes_cache


@takes_cache
def attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`DeepseekV4Attention.forward`."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    batch, steps = hidden_states.shape[:2]
    cos, sin = position_embeddings[self.rope_layer_type]
    residual = self.q_a_norm(self.q_a_proj(hidden_states))
    query = self.q_b_norm(self.q_b_proj(residual).view(batch, steps, -1, self.head_dim).transpose(1, 2))
    query = apply_rotary_pos_emb(query, cos, sin)
    key = self.kv_norm(self.kv_proj(hidden_states)).view(batch, steps, -1, self.head_dim).transpose(1, 2)
    key = apply_rotary_pos_emb(key, cos, sin)
    if cache is not None:
        key = cache.update(key, key, self.layer_idx)[0]
    visible = attention_mask if attention_mask.dtype is torch.bool else attention_mask == 0
    if self.compressor is not None:
        entries, seen = self.compressor(hidden_states, residual, position_ids, cache, self.layer_idx)
        visible = torch.cat([visible.expand(batch, 1, steps, key.shape[2]), seen], dim=-1)
        key = torch.cat([key, entries], dim=2)
    mixed = torch.ops.t2n.attention(query, key, key, visible, self.scaling, False, None, self.sinks)
    # The values were turned with the keys: turn the sum back.
    mixed = apply_rotary_pos_emb(mixed, cos, -sin).transpose(1, 2)
    grouped = self.o_a_proj(mixed.reshape(batch, steps, self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(grouped), None


def heavily_compressed(
    self: Any, hidden_states: torch.Tensor, _: torch.Tensor, position_ids: torch.Tensor, cache: Any, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`DeepseekV4HCACompressor.forward`: the entries [B, 1, N, D], and which of them a query sees, bool [B, 1, S, N]."""
    entries = _entries(self, "compressor_input", hidden_states, cache, layer)
    seen = _closed(self, entries.shape[2], position_ids)
    return entries, seen.unsqueeze(1).expand(hidden_states.shape[0], -1, -1, -1)


def sparsely_compressed(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, position_ids: torch.Tensor, cache: Any, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`DeepseekV4CSACompressor.forward`: as `heavily_compressed`, a query sees those that its indexer chooses."""
    entries = _entries(self, "compressor_input", hidden_states, cache, layer)
    return entries, self.indexer(hidden_states, residual, position_ids, cache, layer).unsqueeze(1)


def chosen_entries(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, position_ids: torch.Tensor, cache: Any, layer: int
) -> torch.Tensor:
    """`DeepseekV4Indexer.forward`, which returns which entries are chosen, bool [B, S, N], instead of their numbers."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    batch, steps = hidden_states.shape[:2]
    entries = _entries(self, "indexer_input", hidden_states, cache, layer).squeeze(1)
    cos, sin = self.rotary_emb(hidden_states, position_ids=position_ids, layer_type=self.rope_layer_type)
    query = self.q_b_proj(residual).view(batch, steps, -1, self.head_dim).transpose(1, 2)
    query = apply_rotary_pos_emb(query, cos, sin).transpose(1, 2)
    scores = self.scorer(query, entries, hidden_states)
    return best(scores.masked_fill(~_closed(self, entries.shape[1], position_ids), NEVER), self.index_topk)


def _closed(module: Any, count: int, position_ids: torch.Tensor) -> torch.Tensor:
    """Say which of `count` entries are whole up to a query's position, bool [1, S, N]."""
    number = torch.arange(count, device=position_ids.device)
    return number[None, None, :] < ((position_ids + 1) // module.compress_rate).unsqueeze(-1)


def _entries(module: Any, name: str, hidden_states: torch.Tensor, cache: Any, layer: int) -> torch.Tensor:
    """Return an entry for every `compress_rate` tokens [B, 1, N, D]; the last may be of fewer."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    rows = torch.cat([module.kv_proj(hidden_states), module.gate_proj(hidden_states)], dim=-1)
    if cache is not None:
        rows = cache.layers[layer].append(name, rows)
    values, gates = whole_blocks(rows, 1, module.compress_rate, 0.0).chunk(2, dim=-1)
    gates = (gates + module.position_bias).float()
    if values.shape[-1] > module.head_dim:
        values, gates = (_after_the_one_before(each, filler) for each, filler in ((values, 0.0), (gates, NEVER)))
    mixed = module.kv_norm((values * gates.softmax(dim=2).to(values.dtype)).sum(dim=2))
    positions = torch.arange(mixed.shape[1], device=mixed.device)[None] * module.compress_rate
    cos, sin = module.rotary_emb(mixed, position_ids=positions, layer_type=module.rope_layer_type)
    turned: torch.Tensor = apply_rotary_pos_emb(mixed.unsqueeze(1), cos, sin)
    return turned


def _after_the_one_before(blocks: torch.Tensor, filler: float) -> torch.Tensor:
    """Of blocks [B, N, R, 2 D]: the first halves of the block before, then the second halves of the own, [B, N, 2 R, D]."""
    former, own = blocks.chunk(2, dim=-1)
    before = torch.cat([former.new_full((former.shape[0], 1, *former.shape[2:]), filler), former], dim=1)
    return torch.cat([before.narrow(1, 0, own.shape[1]), own], dim=2)

"""Families whose attention is written for lengths that a graph cannot have: their forwards in terms of our operator.

In: nothing. Out: `explicit_attention_families()`, inside which the classes of those families call `t2n::attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from kvcache import attention_compressed
from kvcache.attention_blocks import minimax_m3_keys, minimax_m3_mask, qwen4_keys
from kvcache.compat import family_class

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
    with replaced_forwards(_FORWARDS):
        yield


def _mpt_attention(
    self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, past_key_values: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """MPT: the bias is cut out of a table as long as the longest sequence; here it is computed for the length there is."""
    batch, steps = hidden_states.shape[:2]
    joined = self.Wqkv(hidden_states)
    if self.clip_qkv:
        joined = joined.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        each.reshape(batch, steps, self.n_heads, self.head_dim).transpose(1, 2) for each in joined.chunk(3, dim=2)
    )
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    total = key.shape[2]
    # ALiBi (Press et al. 2022): slope * distance; the table's entry one before the last is that of the distance 1.
    slopes = -position_bias[:, 0, position_bias.shape[2] - 2]
    distance = torch.arange(1 - total, 1, device=key.device)[None, None, None, :]
    bias = (slopes[None, :, None, None] * distance).expand(-1, -1, steps, -1)
    mixed = torch.ops.t2n.attention(query, key, value, bias, self.softmax_scale, True, None, None)
    return self.out_proj(mixed.transpose(1, 2).reshape(batch, steps, self.hidden_size)), None


_FORWARDS: Forwards = {
    ("mpt", "MptAttention", "forward"): _mpt_attention,
    ("deepseek_v4", "DeepseekV4Attention", "forward"): attention_compressed.attention,
    ("deepseek_v4", "DeepseekV4HCACompressor", "forward"): attention_compressed.heavily_compressed,
    ("deepseek_v4", "DeepseekV4CSACompressor", "forward"): attention_compressed.sparsely_compressed,
    ("deepseek_v4", "DeepseekV4Indexer", "forward"): attention_compressed.chosen_entries,
    ("minimax_m3_vl", "MiniMaxM3VLIndexer", "forward"): minimax_m3_keys,
    ("minimax_m3_vl", "MiniMaxM3VLIndexer", "build_block_mask"): minimax_m3_mask,
    ("qwen4_exp", "Qwen4ExpTextQSAIndexer", "forward"): qwen4_keys,
}

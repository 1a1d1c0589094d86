"""Families whose attention is written for lengths that a graph cannot have: their forwards in terms of our operator.

In: nothing. Out: `explicit_attention_families()`, inside which the classes of those families call `t2n::attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch

from generic_export.ops.attention import HIDDEN
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates
from kvcache.attention import compressed
from kvcache.attention.blocks import glm5_keys, glm5_mask, minimax_m3_keys, minimax_m3_mask, qwen4_keys
from kvcache.attention.global_tokens import (
    blockwise_attention,
    led_encoder,
    longformer,
    repeated_molecules,
    windowed_attention,
)
from kvcache.compat import family_class, takes_cache


# Funnel: relative positions of pooled texts, for lengths that are not known; transformers counts them in Python's
# lists.
# In: a length. Out: embeddings of the distances between queries and keys of each block.
@dataclass(frozen=True)
class _Places:
    """Positions first, first + step, ...: what a block's rows stand for in the text."""

    first: int
    step: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.step * (self.count - 1)


def position_embeds(self: Any, seq_len: int, dtype: torch.dtype, device: torch.device) -> Any:
    """`FunnelAttentionStructure.get_position_embeds` (Dai et al. 2020, appendix A.2), of any length.

    Returns:
        For each block the embeddings [distances, D] between its rows, and between those and the rows that they pool (None for
        the first block); of factorised attention what transformers returns.
    """
    width = self.config.d_model
    frequencies = 1 / (10000 ** (torch.arange(0, width // 2, device=device).to(dtype) / (width // 2)))

    def embedded(distances: torch.Tensor) -> torch.Tensor:
        angles = distances.to(dtype)[:, None] * frequencies
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)

    if self.config.attention_type == "factorized":
        angles = torch.arange(seq_len, device=device).to(dtype)[:, None] * frequencies
        sine, cosine = torch.sin(angles), torch.cos(angles)
        pairs = ((sine, sine), (cosine, cosine), (cosine, sine), (-sine, cosine))  # phi, pi, psi, omega
        return tuple(torch.cat(pair, dim=-1) for pair in pairs)
    rows, found = _Places(0, 1, seq_len), []
    for block in range(self.config.num_blocks):
        pooling = None
        if block:
            pooled = _pooled(self.config, rows, block)
            pooling = embedded(_distances(rows, pooled, 2 ** (block - 1), 2, device))
            rows = pooled
        found.append([embedded(_distances(rows, rows, 2**block, 1, device)), pooling])
    return found


def _pooled(config: Any, rows: _Places, block: int) -> _Places:
    """Return every second position; the class token stays, as the one before the first that is pooled."""
    if not config.separate_cls:
        return _Places(0, 2**block, (rows.count + 1) // 2)
    count = 1 + ((rows.count - 1) // 2 if config.truncate_seq else rows.count // 2)
    return _Places(1 - 2**block, 2**block, count)


def _distances(rows: _Places, pooled: _Places, stride: int, shift: int, device: torch.device) -> torch.Tensor:
    """`FunnelAttentionStructure.relative_pos`: from the farthest before to the farthest after, int64."""
    farthest = pooled.first - rows.first + shift * pooled.count * stride
    return torch.arange(farthest, pooled.first - rows.last - 1, -stride, device=device)


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
    ("glm5_next", "Glm5NextTextIndexer", "forward"): glm5_keys,
    ("glm5_next", "Glm5NextTextAttention", "build_attention_mask_from_topk"): glm5_mask,
}


# Hyper-connections (DeepSeek-V4): the normalization of their mixing matrices as one operator.
# transformers writes 20 rounds out for each connection, 230 of the 650 operators of a layer, which PyTorch traces one
# by one. The graph has them all the same.
@torch.library.custom_op("t2n::sinkhorn", mutates_args=())
def sinkhorn(matrix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Divide rows, then columns, by their sums, several times (Sinkhorn and Knopp 1967).

    Args:
        matrix: float [..., N, N], positive.
        rounds: how often.
        eps: added to each sum.

    Returns:
        A matrix of the same shape whose rows and columns sum to about 1.
    """
    matrix = matrix.clone()  # also of no round: an operator returns a tensor of its own
    for _ in range(rounds):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


@sinkhorn.register_fake
def _(matrix: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(matrix)


@translates(torch.ops.t2n.sinkhorn.default)
def translate_sinkhorn(b: NnefBuilder, matrix: Value, rounds: int, eps: float) -> Value:
    """t2n::sinkhorn(Tensor matrix, int rounds, float eps) -> Tensor"""
    for _ in range(rounds):
        for axis in (matrix.rank - 1, matrix.rank - 2):
            total = b.reduce("sum_reduce", matrix, [axis], keepdim=True)
            matrix = b.binary("div", matrix, b.binary("add", total, b.scalar(float(eps), matrix.dtype)))
    return matrix


def mixing_weights(forward: Any) -> Any:
    """Return `DeepseekV4HyperConnection.forward` with all rounds but the first half as one operator.

    Args:
        forward: transformers' own, which ends with those rounds: it returns what they make and does not use it.
    """

    @wraps(forward)
    def replaced(self: Any, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rounds = self.hc_sinkhorn_iters - 1
        with mock.patch.object(self, "hc_sinkhorn_iters", 1):
            post, comb, collapsed = forward(self, hidden_streams)
        return post, torch.ops.t2n.sinkhorn(comb, rounds, self.hc_eps), collapsed

    return replaced

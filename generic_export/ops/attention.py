"""Scaled dot-product attention: `tract_transformers_sdpa` where that operator has PyTorch's meaning, spelled out elsewhere.

The emission functions are shared with `kvcache`, whose own attention operator differs in its masks only.
"""

from __future__ import annotations

import math

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.attention_forms import PADDING_ROWS
from generic_export.nnef.graph import Argument
from generic_export.ops.indexing import arange
from generic_export.ops.shape import volume
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.dims import Dim, Shape, same_dim, same_shape, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value, broadcast_shape, ints, tract_dtype
from generic_export.translate.registry import translates

aten = torch.ops.aten

# docs/contributing/engine-facts.md#the-attention-operator: the operator's kernel computes in f32 from f16 or f32 heads.
_ENGINE_DTYPES = (torch.float16, torch.float32)

# f16's lowest number: tract's mark for "not visible" (flash_sdpa.rs skips tiles below -65503).
HIDDEN = -65504.0
# f32's lowest: a score drowns in it, so that a query that sees nothing averages all keys, as transformers' eager attention does.
LOWEST = torch.finfo(torch.float32).min

HEAD_SIZES = (64, 128)
"""Sizes of heads that tract's CUDA kernel is compiled for (cuda/src/transform.rs); others become primitive operators."""


@translates(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    b: NnefBuilder,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., ...)"""
    if dropout_p:
        raise TranslationError("attention with dropout is random.", "Call it with dropout_p=0 outside training.")
    width = query.shape[-1]
    if not isinstance(width, int) and scale is None:
        raise TranslationError("attention over a dynamic head size needs an explicit scale.")
    factor = float(scale) if scale is not None else float(width) ** -0.5
    shape = _result_shape(query, key, value, attn_mask, enable_gqa=enable_gqa)
    heads = _Heads(b, shape[:-2], grouped=enable_gqa)
    wide = torch.float32 if b.numerics.f32_attention else query.dtype
    q, k, v = (heads.folded(b.cast(tensor, wide)) for tensor in (query, key, value))
    mask, engine_causal = attn_mask, False
    if is_causal:
        # docs/contributing/engine-facts.md#the-attention-operator: tract's own causal mask is aligned at the
        # bottom right, PyTorch's at the top left.
        engine_causal = same_dim(query.shape[-2], key.shape[-2]) and wide in _ENGINE_DTYPES
        mask = None if engine_causal else causal_mask(b, query.shape[-2], key.shape[-2], past=0)
    result = _attention(b, (q, k, v), None if mask is None else heads.folded_mask(mask), factor, engine_causal)
    if attn_mask is not None:
        result = b.select(_sees_something(b, heads.folded_mask(attn_mask)), result, b.scalar(0.0, result.dtype))
    return b.cast(b.reshape(result, shape), query.dtype)


def _attention(
    b: NnefBuilder, qkv: tuple[Value, Value, Value], mask: Value | None, scale: float, engine_causal: bool
) -> Value:
    """The operator for masks that say yes or no; a float mask may hold anything, which the operator does not take.

    tract (flash_sdpa.rs): tiles whose mask is below -65503 throughout are skipped, and a query whose first tile of 32 keys
    is all -inf becomes NaN: a bias of -1e9 or -inf does not mean there what it means in a softmax.
    """
    query, key, value = qkv
    steps, total = query.shape[-2], key.shape[-2]
    yes_or_no = mask is None or mask.dtype is torch.bool
    if query.dtype in _ENGINE_DTYPES and yes_or_no:
        additive = None if mask is None else additive_mask(b, mask, steps, total)
        return engine_attention(b, query, key, value, additive, scale, is_causal=engine_causal)
    if mask is not None and mask.dtype is torch.bool:
        mask = additive_mask(b, mask, steps, total)
    return spelled_out_attention(b, query, key, value, mask, scale)


def _sees_something(b: NnefBuilder, mask: Value) -> Value:
    """bool [B or 1, H or 1, S or 1, 1]: PyTorch answers 0 for a query that no key is visible to."""
    # Not the maximum of the mask itself: tract starts it from the lowest finite number, which -inf never beats.
    minus_infinity = b.scalar(float("-inf"), mask.dtype if mask.dtype.is_floating_point else torch.float32)
    seen = mask if mask.dtype is torch.bool else b.binary("gt", mask, minus_infinity, dtype=torch.bool)
    count = b.reduce("max_reduce", b.cast(seen, torch.float32), [mask.rank - 1], keepdim=True)
    return b.binary("gt", count, b.scalar(0.0, torch.float32), dtype=torch.bool)


def _result_shape(query: Value, key: Value, value: Value, mask: Value | None, *, enable_gqa: bool) -> Shape:
    batch: Shape = query.shape[:-2]
    if enable_gqa:
        batch = (*broadcast_shape(query.shape[:-3], broadcast_shape(key.shape[:-3], value.shape[:-3])), query.shape[-3])
    else:
        batch = broadcast_shape(batch, broadcast_shape(key.shape[:-2], value.shape[:-2]))
        if mask is not None and mask.rank > 2:
            batch = broadcast_shape(batch, mask.shape[:-2])
    return (*batch, query.shape[-2], value.shape[-1])


class _Heads:
    """DivisibleAxes any number of leading axes into the two, batch and heads, that tract's operator has."""

    def __init__(self, b: NnefBuilder, batch: Shape, *, grouped: bool) -> None:
        self._b = b
        self._batch = batch
        self._grouped = grouped
        # docs/contributing/engine-facts.md#the-attention-operator: tract refuses a symbolic number of heads;
        # those go to the batch, which may be symbolic.
        self._heads_apart = len(batch) >= 2 and isinstance(batch[-1], int)
        if grouped and not self._heads_apart:
            raise TranslationError("grouped-query attention needs a static number of heads, and a batch axis.")

    def folded(self, value: Value) -> Value:
        """Return query, key or value as [batch, heads, positions, width]."""
        heads = value.shape[-3] if self._grouped else None
        return self._fold(value, heads)

    def folded_mask(self, mask: Value) -> Value:
        """Return a mask as [batch or 1, heads or 1, S or 1, T or 1]."""
        aligned = self._b.align_rank(mask, max(mask.rank, 4))
        if aligned.rank == 4 and self._heads_apart and len(self._batch) == 2:
            return aligned
        if all(same_dim(dim, 1) for dim in aligned.shape[:-2]):
            return self._b.reshape(aligned, [1, 1, *aligned.shape[-2:]])
        return self._fold(mask, None)

    def _fold(self, value: Value, heads: Dim | None) -> Value:
        batch = self._batch if heads is None else (*self._batch[:-1], heads)
        aligned = self._b.align_rank(value, len(batch) + 2)
        full = self._b.broadcast(aligned, [*batch, *value.shape[-2:]])
        if self._heads_apart:
            return self._b.reshape(full, [volume(batch[:-1]), batch[-1], *value.shape[-2:]])
        return self._b.reshape(full, [volume(batch), 1, *value.shape[-2:]])


# --- emission, shared with kvcache -----------------------------------------------------------------


def engine_attention(
    b: NnefBuilder, query: Value, key: Value, value: Value, mask: Value | None, scale: float, *, is_causal: bool
) -> Value:
    """Emit tract's operator; query [B,H,S,D], key and value [B,Hkv,T,*], mask float [B or 1, H or 1, S, T].

    `is_causal` is aligned at the bottom right: the queries are the last S of T positions. Where the target wants no
    operator, the same is spelled out.
    """
    if not b.spelling.attention_operator:
        if is_causal:
            steps, total = query.shape[-2], key.shape[-2]
            mask = additive_mask(b, causal_mask(b, steps, total), steps, total)
        return spelled_out_attention(b, query, key, value, mask, scale)
    return attention_operator(b, query, key, value, mask, scale, is_causal=is_causal)


def attention_operator(
    b: NnefBuilder, query: Value, key: Value, value: Value, mask: Value | None, scale: float, *, is_causal: bool
) -> Value:
    """Emit tract's operator, whatever the target prefers; arguments as `engine_attention`."""
    inputs = [query, key, value] if mask is None else [query, key, value, mask]
    attributes: dict[str, Argument] = {
        "scale": float(scale),
        "datum_type": tract_dtype(query.dtype),
        # Scores and sums in f32 even for f16 heads, as PyTorch does on CPU; an f16 sum over a long past is not safe.
        "acc_datum_type": "f32",
        "is_causal": is_causal,
    }
    shape = (*query.shape[:-1], value.shape[-1])
    return b.emit("tract_transformers_sdpa", inputs, shape=shape, dtype=query.dtype, attributes=attributes)


def additive_mask(b: NnefBuilder, mask: Value, steps: Dim, total: Dim, hidden: float = HIDDEN) -> Value:
    """Return a bool mask as floats to add to scores: 0 where a query may look, `hidden` elsewhere; last two axes full.

    The operator takes a float mask only, and does not repeat its last two axes. Not -inf, since the kernel makes NaN of a
    query whose first 32 keys are all -inf, as under a sliding window or left padding
    (docs/contributing/engine-facts.md#the-attention-operator).
    """
    full = b.broadcast(mask, (*mask.shape[:-2], steps, total))
    return b.select(full, b.scalar(0.0, torch.float32), b.scalar(hidden, torch.float32))


def causal_mask(b: NnefBuilder, steps: Dim, total: Dim, *, past: Dim | None = None) -> Value:
    """Return bool [1, 1, S, T]: key position j <= past + query position i; the queries stand last when past is None."""
    start = simplify_dim(sympy.sympify(total) - sympy.sympify(steps)) if past is None else past
    end = simplify_dim(sympy.sympify(start) + sympy.sympify(steps))
    # One axis at a time, as a mask written in PyTorch reaches us: the two are then one operation. tract fails on equal ones
    # ("eval() called on a Dummy op", 0.23.9).
    queries, keys = arange(b, start, end), arange(b, 0, total)
    for axis in (0, 1, 3):
        queries = b.unsqueeze(queries, [axis])
    for axis in (0, 1, 2):
        keys = b.unsqueeze(keys, [axis])
    return b.binary("le", keys, queries, dtype=torch.bool)


def spelled_out_attention(
    b: NnefBuilder,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    scale: float,
    softcap: float | None = None,
    sinks: Value | None = None,
) -> Value:
    """Products, cap (Gemma 2), mask, softmax, product; heads grouped, never repeated. Shapes as `engine_attention`.

    `sinks`, [H] or [B,H,S,1], are the scores of one more key per head, whose value is zero (GPT-OSS).
    """
    batch, heads, steps, width = query.shape
    key_heads = key.shape[1]
    groups = simplify_dim(sympy.sympify(heads) / sympy.sympify(key_heads))
    accumulator = torch.float64 if query.dtype is torch.float64 else torch.float32
    grouped = b.reshape(query, [batch, key_heads, groups, steps, width])
    scores = b.einsum("bhgsd,bhtd->bhgst", [grouped, key], accumulator=accumulator)
    grouped_mask = None if mask is None else _grouped_mask(b, b.cast(mask, accumulator), key_heads, groups)
    sizes = (batch, key_heads, groups, steps)
    column = None if sinks is None else _sink_column(b, b.cast(sinks, accumulator), sizes)
    weights = _softmax_of_scores(b, scores, grouped_mask, scale, softcap, column)
    weights = b.cast(weights, value.dtype)
    mixed = b.einsum("bhgst,bhtd->bhgsd", [weights, value], accumulator=value.dtype)
    return b.reshape(mixed, [batch, heads, steps, value.shape[-1]])


def grouped_attention(
    b: NnefBuilder,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    scale: float,
    softcap: float | None = None,
    sinks: Value | None = None,
    further: tuple[Value, Value] | None = None,
) -> Value:
    """Two products for each key head, the cache first: the form that tract runs fastest over a long past.

    The queries that share a key head are rows of one product, so that keys and values are read once, not once for each query
    head. Scores and sums are f32 whatever the heads are; the engine multiplies an f16 cache with them as it is. Arguments as
    `spelled_out_attention`; `further` are more channels of queries and keys, where a cache keeps the keys in two parts.
    """
    batch, heads, steps, _ = query.shape
    key_heads, total = key.shape[1:3]
    groups = simplify_dim(sympy.sympify(heads) / sympy.sympify(key_heads))
    rows = simplify_dim(sympy.sympify(groups) * sympy.sympify(steps))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    row_mask = None
    if mask is not None:
        full = b.broadcast(b.cast(mask, wide), [*mask.shape[:2], steps, total])
        row_mask = _row_mask(b, full, key_heads, groups, rows)
    if not b.spelling.fused_softmax and query.dtype is wide:
        # There are fewer queries than scores. Not in f16, where a scaled query would be rounded again.
        factor = scale if softcap is None else scale / softcap
        query = _scaled(b, query, factor)
        further = None if further is None else (_scaled(b, further[0], factor), further[1])
        scale = 1.0 if softcap is None else softcap
    scores = _scores_of_rows(b, query, key, rows, wide)
    if further is not None:
        scores = b.binary("add", scores, _scores_of_rows(b, *further, rows, wide))
    if softcap is None and sinks is None and row_mask is not None and b.spelling.fused_softmax:
        attributes: dict[str, Argument] = {"scale": float(scale)}
        operator = "tract_transformers_scaled_masked_softmax"
        weights = b.emit(operator, [scores, row_mask], shape=scores.shape, dtype=wide, attributes=attributes)
    else:
        column = None
        if sinks is not None:
            apart = _sink_column(b, b.cast(sinks, wide), (batch, key_heads, groups, steps))
            column = b.reshape(apart, [batch, key_heads, rows, 1])
        weights = _softmax_of_scores(b, scores, row_mask, scale, softcap, column)
    mixed = b.einsum("bhnv,bhmn->bhmv", [value, weights], accumulator=wide)
    return b.cast(b.reshape(mixed, [batch, heads, steps, value.shape[-1]]), query.dtype)


def _scores_of_rows(b: NnefBuilder, query: Value, key: Value, rows: Dim, accumulator: torch.dtype) -> Value:
    """[B,H,S,D] and [B,Hkv,T,D] -> [B,Hkv,G*S,T]"""
    grouped = b.reshape(query, [query.shape[0], key.shape[1], rows, query.shape[-1]])
    return b.einsum("bhnk,bhmk->bhmn", [key, grouped], accumulator=accumulator)


def _scaled(b: NnefBuilder, value: Value, factor: float) -> Value:
    return value if factor == 1.0 else b.binary("mul", value, b.scalar(float(factor), value.dtype))


def _softmax_of_scores(
    b: NnefBuilder, scores: Value, mask: Value | None, scale: float, softcap: float | None, sinks: Value | None
) -> Value:
    """Scale, cap, mask and normalise scores [..., T]; `sinks` [..., 1] are scores of one more key, which is then left out."""
    total, axis = scores.shape[-1], scores.rank - 1
    scores = _scaled(b, scores, scale if softcap is None else scale / softcap)
    if softcap is not None:
        scores = b.binary("mul", b.unary("tanh", scores), b.scalar(float(softcap), scores.dtype))
    if mask is not None:
        scores = b.binary("add", scores, mask)
    if sinks is not None:
        scores = b.concat([scores, sinks], axis)
    attributes: dict[str, Argument] = {"axes": ints([axis])}
    weights = b.emit("softmax", [scores], shape=scores.shape, dtype=scores.dtype, attributes=attributes)
    return weights if sinks is None else b.slice(weights, axis, 0, total)


def _sink_column(b: NnefBuilder, sinks: Value, sizes: tuple[Dim, Dim, Dim, Dim]) -> Value:
    """Sinks [H] or [B,H,S,1] as the scores of one more key, [B,Hkv,G,S,1]."""
    batch, key_heads, groups, steps = sizes
    shared = sinks.rank == 1
    column = b.reshape(sinks, [1 if shared else batch, key_heads, groups, 1 if shared else steps, 1])
    return b.broadcast(column, [batch, key_heads, groups, steps, 1])


def _row_mask(b: NnefBuilder, mask: Value, key_heads: Dim, groups: Dim, rows: Dim) -> Value:
    """[B or 1, H or 1, S, T] -> [B or 1, Hkv or 1, G*S, T]"""
    batch, heads, steps, total = mask.shape
    if same_dim(heads, 1):
        return b.reshape(b.broadcast(mask, [batch, groups, steps, total]), [batch, 1, rows, total])
    return b.reshape(mask, [batch, key_heads, rows, total])


def _grouped_mask(b: NnefBuilder, mask: Value, key_heads: Dim, groups: Dim) -> Value:
    """[B or 1, H or 1, S, T] -> [B or 1, Hkv or 1, G or 1, S, T]"""
    if same_dim(mask.shape[1], 1):
        return b.unsqueeze(mask, [2])
    return b.reshape(mask, [mask.shape[0], key_heads, groups, *mask.shape[2:]])


@rewrites(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention_with_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the logarithms of its weights' sums, for which PyTorch's own decomposition gives the weights."""
    if dropout_p:
        raise TranslationError("attention has active dropout.", "Call model.eval() before the export.")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# tract's attention operator with keys and values padded, so that its CUDA kernel never needs the tile that it reads
# too early.
# The kernel (flash_attn.cu, tract 0.23.9) does not wait for the last tile of V. Behind 64 rows of padding, the last
# full tile and the tail tile are both padding, whose weights are zero. The mask hides the padding, so the operator
# cannot be causal itself.
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

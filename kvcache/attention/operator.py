"""Attention as one operator with the engine's meaning: grouped-query heads not repeated, causal at the bottom right.

`explicit_attention()` makes transformers call it, through its own attention and mask interfaces, inside a `with` block;
the translation below writes it as `tract_transformers_sdpa`, or spelled out where that operator has no such variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_sure
from torch.overrides import TorchFunctionMode

from generic_export.compat import viewed
from generic_export.errors import CaptureError
from generic_export.ops.attention import (
    HIDDEN,
    LOWEST,
    additive_mask,
    causal_mask,
    engine_attention,
    grouped_attention,
    padded_attention,
    spelled_out_attention,
    takes_padding,
)
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates
from kvcache.attention.families import explicit_attention_families, registered
from kvcache.attention.latent import absorbed_projections
from kvcache.compat import attention_tables

Model = TypeVar("Model")

# Tensors that transformers hands to every implementation, and that ours, with one sequence in a row, has no use for.
_IDLE = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})

_SPELLED_OUT = "eager"  # transformers' name for attention in plain operators

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
    sinks: torch.Tensor | None = None,
    further_query: torch.Tensor | None = None,
    further_key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention over all cached positions.

    Args:
        query: [B, H, S, D] float.
        key: [B, Hkv, T, D]; H is a multiple of Hkv, head h reads key head h // (H / Hkv).
        value: [B, Hkv, T, Dv].
        mask: broadcastable to [B, H, S, T]; bool, True where a query may look, or float, added to the scores. None when
            `is_causal` says it all.
        scale: factor of the scores.
        is_causal: query i sees keys up to T - S + i (the queries are the last S positions).
        softcap: scores become softcap * tanh(scores / softcap) before the mask, when given.
        sinks: [H] or [B, H, S, 1], scores of one more key per head, whose value is zero (GPT-OSS), when given.
        further_query, further_key: [B, H, S, E] and [B, Hkv, T, E], more channels of queries and keys, where the keys are kept in
            two parts (latent attention).

    Returns:
        [B, H, S, Dv], in the element type of `query`.
    """
    if further_query is not None and further_key is not None:
        query, key = torch.cat((query, further_query), dim=-1), torch.cat((key, further_key), dim=-1)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        steps, total = scores.shape[-2:]
        allowed = torch.ones(steps, total, dtype=torch.bool, device=scores.device).tril(total - steps)
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None and mask.dtype is torch.bool:
        # No infinity: a query that sees nothing averages all keys, as transformers has it.
        scores = scores.masked_fill(~mask, LOWEST)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float()[None, :, None, None] if sinks.ndim == 1 else sinks.float()
        column = column.expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
    return (weights.to(value.dtype) @ value).to(query.dtype)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


# --- transformers' side --------------------------------------------------------------------------


@dataclass
class AttentionChoice:
    """Which attention implementation a model runs with: ours, or its own where it has no other.

    Attributes:
        masked: every mask is written out, also a plain causal one.
        calls: how often the model under trial has called ours.
        unmasked: how often it did so without a mask, for attention that it does not call causal either.
        left_out: how many plain causal masks were left out.
        relied: how often ours was called causal and without a mask, for several tokens.
        made: the masks of decoders that were made.
        taken: how often ours was called with one of them.
        shown: all masks that were made, also those of encoders.
        added: how often one was added to something: what spells its attention out takes numbers, and ours are yes or no.
    """

    masked: bool = False
    calls: int = 0
    unmasked: int = 0
    left_out: int = 0
    relied: int = 0
    made: list[torch.Tensor] = field(default_factory=list)
    taken: int = 0
    shown: list[torch.Tensor] = field(default_factory=list)
    added: int = 0

    def first_that_runs(self, build: Callable[[str], Model]) -> Model:
        """Return what `build(name)` makes with the first implementation that the model really uses.

        Families that are older than transformers' attention interface spell their attention out; they look their own
        implementations up by name, or ask for a mask and take none for one that hides nothing. Others use the interface, and
        rely on the mask alone. An encoder of these beside a decoder of those (TrOCR) asks for masks that never arrive in ours.

        Args:
            build: makes a model of an implementation's name, and runs it once.

        Raises:
            CaptureError: as `build` does, when no implementation will do.
        """
        for masked in (False, True):
            vars(self).update(vars(AttentionChoice(masked)))
            try:
                # Some models make other masks while they are captured: the trial must see those.
                with mock.patch("torch.compiler.is_compiling", return_value=True), _Additions(self):
                    model = build(ATTENTION_NAME)
            except CaptureError:
                break
            if self.added:  # masks in numbers are made without a look at their values, too
                with mock.patch("torch.compiler.is_compiling", return_value=True):
                    return build(_SPELLED_OUT)
            if self.calls and not self._missed():
                return model
        return build(_SPELLED_OUT)

    def _missed(self) -> bool:
        """Say whether a mask that the model asked for seems to be applied elsewhere, or was left out and is relied on."""
        if self.left_out and (self.unmasked or not (self.relied or self.taken)):
            return True
        return self.masked and bool(self.made) and not self.taken

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Stand in transformers' table of attention functions."""
        self.calls += 1
        return _attention_forward(self, module, *args, **kwargs)

    def mask(self, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor | None:
        """Stand in transformers' table of mask functions."""
        from transformers.masking_utils import bidirectional_mask_function

        kwargs["allow_is_causal_skip"] = kwargs.get("allow_is_causal_skip", True) and not self.masked
        mask = _attention_mask(q_length, kv_length, **kwargs)
        self.left_out += mask is None
        if mask is not None:
            self.shown.append(mask)
        if mask is not None and kwargs.get("mask_function") is not bidirectional_mask_function:
            self.made.append(mask)
        return mask


class _Additions(TorchFunctionMode):
    """Counts the masks of a choice that are added to something, such as scores (BigBirdPegasus' encoder)."""

    def __init__(self, choice: AttentionChoice) -> None:
        super().__init__()
        self._choice = choice

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SUMS:
            terms = [viewed(term) for term in args if isinstance(term, torch.Tensor)]
            self._choice.added += any(term is viewed(mask) for term in terms for mask in self._choice.shown)
        return func(*args, **(kwargs or {}))


_SUMS = frozenset((torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__radd__))


@contextmanager
def explicit_attention(*, masked: bool = False) -> Iterator[AttentionChoice]:
    """Register the explicit attention with transformers inside a `with` block, and yield what selects it for a model.

    Args:
        masked: see `AttentionChoice`; for a model that another block prepared.
    """
    choice = AttentionChoice(masked)
    attentions, masks = attention_tables()
    with (
        registered(attentions, ATTENTION_NAME, choice.forward),
        registered(masks, ATTENTION_NAME, choice.mask),
        explicit_attention_families(),
    ):
        yield choice


def _attention_forward(
    choice: AttentionChoice,
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
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' AttentionInterface signature after `choice`; returns [B, S, H, Dv] and no weights.

    Raises:
        CaptureError: the model hands over something that decides the result and that we do not know.
    """
    unknown = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in _IDLE]
    if unknown:
        raise CaptureError(f"{type(module).__name__}: explicit attention does not support {unknown[0]!r}.")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if is_sure(query.shape[0] == 1) and not is_sure(key.shape[0] == 1):
        # One set of queries for all keys (Granite Speech).
        query = query.expand(key.shape[0], -1, -1, -1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if indices is not None:
        attention_mask = _chosen_keys(indices, key.shape[2], attention_mask)
    several = not is_sure(query.shape[2] == 1)  # asking a size that may be 1 would hold the graph to the answer
    choice.unmasked += attention_mask is None and not causal and several
    causal = bool(causal) and attention_mask is None
    choice.relied += causal and several
    choice.taken += attention_mask is not None and any(viewed(attention_mask) is viewed(each) for each in choice.made)
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask)
    sinks = s_aux if sinks is None else sinks
    absorbed = absorbed_projections(module)
    if absorbed is not None:
        query, further = absorbed.queries(query)
        pair = (further, value)  # the rotated keys
        latents = torch.ops.t2n.attention(query, key, key, attention_mask, scale, causal, softcap, sinks, *pair)
        result = absorbed.mixed(latents)
    else:
        result = torch.ops.t2n.attention(query, key, value, attention_mask, scale, causal, softcap, sinks)
    return result.transpose(1, 2).contiguous(), None


def _biased(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """What is added to the scores: a bias [B, H, S, T], and very much less where a mask is False or says so."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, HIDDEN) if mask.dtype is torch.bool else bias + mask


def _chosen_keys(indices: torch.Tensor, total: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Sparse attention (DeepSeek-V3.2): each query sees the keys that an indexer has chosen for it, int [B, S, k]."""
    nothing = torch.zeros((*indices.shape[:2], total), dtype=torch.bool, device=indices.device)
    chosen = nothing.scatter(-1, indices.long(), True)[:, None]
    return chosen if mask is None else mask & chosen


def _attention_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> torch.Tensor | None:
    """transformers' AttentionMaskInterface signature; None for the plain causal mask, else bool [1 or B, 1, S, T].

    Args:
        attention_mask: bool [B, T], False where a key is padding. An exported decoder takes no such input, but some models
            make one, of the ids or of ones.
        allow_is_causal_skip: False where the model reads the mask itself.
    """
    from transformers.masking_utils import causal_mask_function

    mask_function = mask_function or causal_mask_function
    if mask_function is causal_mask_function and attention_mask is None and allow_is_causal_skip:
        return None
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    queries = (torch.arange(q_length, device=device) + q_offset)[None, None, :, None]
    keys = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    mask = mask_function(zero, zero, queries, keys)
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, kv_offset : kv_offset + kv_length]
    return mask.expand(-1, -1, q_length, kv_length)


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
    sinks: Value | None = None,
    further_query: Value | None = None,
    further_key: Value | None = None,
) -> Value:
    """t2n::attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool is_causal, float? softcap, ...)"""
    dtype = query.dtype
    yes_or_no = mask is None or mask.dtype is torch.bool
    plain = yes_or_no and softcap is None and sinks is None and further_query is None
    if plain and takes_padding(b, query, key, value):
        return b.cast(padded_attention(b, query, key, value, mask, scale, is_causal=is_causal), dtype)
    further = None if further_query is None or further_key is None else (further_query, further_key)
    if b.numerics.f32_attention:
        query, key, value = (b.cast(tensor, torch.float32) for tensor in (query, key, value))
        further = None if further is None else (b.cast(further[0], torch.float32), b.cast(further[1], torch.float32))
    if further is not None and not b.spelling.attention_products:
        query, key = (b.concat([each, more], 3) for each, more in zip((query, key), further, strict=True))
        further = None
    steps, total = query.shape[-2], key.shape[-2]
    operator = softcap is None and sinks is None and yes_or_no and not b.spelling.attention_products
    additive = mask
    if mask is not None and yes_or_no:
        additive = additive_mask(b, mask, steps, total, HIDDEN if operator else LOWEST)
    if operator:
        return b.cast(engine_attention(b, query, key, value, additive, scale, is_causal=is_causal), dtype)
    if is_causal:
        causal = additive_mask(b, causal_mask(b, steps, total), steps, total)
        additive = causal if additive is None else b.binary("add", b.cast(additive, torch.float32), causal)
    if b.spelling.attention_products:
        return b.cast(grouped_attention(b, query, key, value, additive, scale, softcap, sinks, further), dtype)
    return b.cast(spelled_out_attention(b, query, key, value, additive, scale, softcap, sinks), dtype)

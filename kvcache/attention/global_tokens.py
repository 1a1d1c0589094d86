"""Longformer and LED: each token looks at its neighbours, and tokens that are marked look at all and are looked at by all.

CANINE: each character looks at its own block.

In: masks of any length, bool [B, S]. Out: the forwards of those families over whole rows of keys with a mask, not over chunks of a
window: transformers pads a text to a multiple of the window, and asks whether any token is marked, which shapes alone do not say.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from generic_export.errors import CaptureError


def windowed_attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    is_index_masked: torch.Tensor | None = None,
    is_index_global_attn: torch.Tensor | None = None,
    is_global_attn: bool = False,
    output_attentions: bool = False,
) -> tuple[torch.Tensor]:
    """`LongformerSelfAttention.forward` (Beltagy et al. 2020, section 3.1), [B, S, D].

    In: `is_index_masked` bool [B, S], True for padding; `is_index_global_attn` likewise for what is marked, None for nothing.
    """
    del attention_mask, is_global_attn, output_attentions
    padding = torch.zeros_like(hidden_states[..., 0], dtype=torch.bool) if is_index_masked is None else is_index_masked
    marked = is_index_global_attn
    steps = hidden_states.shape[1]
    place = torch.arange(steps, device=hidden_states.device)
    near = (place[:, None] - place).abs() <= self.one_sided_attn_window_size
    seen = near if marked is None else near | marked[:, None]
    # Padding sees all, lest a row of it has no key; what it says is nothing.
    seen = (seen & ~padding[:, None]) | padding[:, :, None]
    mixed = _mixed(self, hidden_states, (self.query, self.key, self.value), seen)
    if marked is not None:
        projections = (self.query_global, self.key_global, self.value_global)
        mixed = torch.where(marked[..., None], _mixed(self, hidden_states, projections, ~padding[:, None]), mixed)
    return (torch.where(padding[..., None], 0.0, mixed),)


def _mixed(self: Any, states: torch.Tensor, projections: tuple[Any, Any, Any], seen: torch.Tensor) -> torch.Tensor:
    """Return [B, S, D]; `seen` is bool [B, S or 1, S], True for the keys that a row sees."""
    batch, steps, width = states.shape
    query, key, value = (
        each(states).reshape(batch, steps, self.num_heads, self.head_dim).transpose(1, 2) for each in projections
    )
    scale = 1 / math.sqrt(self.head_dim)
    mixed = torch.ops.t2n.attention(query, key, value, seen[:, None], scale, False, None, None)
    return mixed.transpose(1, 2).reshape(batch, steps, width)  # type: ignore[no-any-return]


def longformer(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    global_attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """`LongformerModel.forward`, without padding to a multiple of the window.

    In: `input_ids` int64 [B, S]; masks of that shape, 1 for a token, and for one that is marked.
    """
    from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

    states = self.embeddings(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)
    states = _layers(self.encoder.layer, states, *_masks(input_ids, attention_mask, global_attention_mask))
    pooled = self.pooler(states) if self.pooler is not None else None
    return LongformerBaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


def led_encoder(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    global_attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """`LEDEncoder.forward`, likewise."""
    from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

    states = self.layernorm_embedding(self.embed_tokens(input_ids) + self.embed_positions(input_ids.shape))
    masks = _masks(input_ids, attention_mask, global_attention_mask)
    return LEDEncoderBaseModelOutput(last_hidden_state=_layers(self.layers, states, *masks))


def blockwise_attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[torch.Tensor]:
    """`CanineAttention.forward` (Clark et al. 2022, section 3.2): a mask over whole rows in place of a loop over blocks.

    In: `hidden_states` [B, S, D]; `attention_mask` [B, S, S], 1 for what is seen, where attention is local.

    Raises:
        CaptureError: blocks overlap, or one position is seen by all, which no model of the family has.
    """
    del output_attentions
    if self.local:
        attention_mask = _own_block(self, hidden_states, attention_mask)
    mixed = self.self(hidden_states, hidden_states, attention_mask, False)[0]
    return (self.output(mixed, hidden_states),)


def repeated_molecules(self: Any, molecules: torch.Tensor, char_seq_length: int) -> torch.Tensor:
    """`CanineModel._repeat_molecules`: the molecule of each character, the last one for what is left over, [B, S, D]."""
    last = molecules.shape[1] - 1
    own = torch.arange(char_seq_length, device=molecules.device) // self.config.downsampling_rate + 1
    return molecules.index_select(1, own.clamp(max=last))


def _own_block(self: Any, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a bias [B, 1, S, S]: other blocks are out of reach also of a block that is all padding, whose own are equal."""
    sizes = {getattr(self, f"attend_{side}_chunk_{name}") for side in ("from", "to") for name in ("width", "stride")}
    if len(sizes) > 1 or self.always_attend_to_first_position or self.first_position_attends_to_all or mask is None:
        raise CaptureError(
            "CANINE: its local attention has blocks that overlap, or a position that all see.",
            "Use blocks of one size, as its config's local_transformer_stride makes them.",
        )
    block = torch.arange(states.shape[1], device=states.device) // sizes.pop()
    hidden = (1.0 - mask[:, None].to(states.dtype)) * torch.finfo(states.dtype).min
    return hidden.masked_fill(block[:, None] != block, -math.inf)


def _masks(
    ids: torch.Tensor, attention_mask: torch.Tensor | None, global_attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what is padding, and what is marked and no padding."""
    padding = torch.zeros_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask == 0
    return padding, None if global_attention_mask is None else (global_attention_mask != 0) & ~padding


def _layers(layers: Any, states: torch.Tensor, padding: torch.Tensor, marked: torch.Tensor | None) -> torch.Tensor:
    for layer in layers:
        states = layer(
            states,
            attention_mask=padding,
            is_index_masked=padding,
            is_index_global_attn=marked,
            is_global_attn=marked is not None,
            output_attentions=False,
        )[0]
    return states


__all__ = ["blockwise_attention", "led_encoder", "longformer", "repeated_molecules", "windowed_attention"]

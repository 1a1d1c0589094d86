"""Qwen4-exp: beside the states of its layers it keeps the last token ids, for embeddings of n-grams.

Before the first token that is the end of a text, while a fixed state of the engine starts as zeros: what is kept here is the
difference between a token's id and that of the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvcache.forms.cache import CacheConversation, CacheForm
from kvcache.recurrent import LastRead
from kvcache.states.explicit_cache import ExplicitCache
from kvcache.states.tensors import Slot, States

_TOKENS = 2  # Qwen4ExpTextNGramEmbedding: the number of this state among a layer's convolution states


class Qwen4ExpForm(CacheForm):
    """Token ids counted from the end of a text; see `kvcache.forms.StateForm`."""

    def cache(self, config: Any, past: States | None, last_read: LastRead) -> ExplicitCache:
        """See `CacheForm.cache`."""
        return _RelativeTokens(config, past, last_read)

    def conversation(self, model: nn.Module, *, windowed: bool) -> CacheConversation:
        """See `StateForm.conversation`."""
        return _Conversation(model, windowed)


class _RelativeTokens(ExplicitCache):
    """Given, and giving, token ids counted from the end of a text; the model sees the ids themselves."""

    def __init__(self, config: Any, past: States | None, last_read: LastRead) -> None:
        self._end = _end_of_text(config)
        super().__init__(config, None if past is None else _shifted(past, self._end), last_read)

    def states(self) -> States:
        return _shifted(super().states(), -self._end)


class _Conversation(CacheConversation):
    def __init__(self, model: nn.Module, windowed: bool) -> None:
        super().__init__(model, windowed)
        self._end = _end_of_text(model.config)

    def states(self) -> States:
        return _shifted(super().states(), -self._end)


def _end_of_text(config: Any) -> int:
    end = config.get_text_config(decoder=True).eos_token_id
    return int(end[0] if isinstance(end, list) else end)


def _shifted(states: States, by: int) -> States:
    return {slot: tensor + by if _holds_tokens(slot, tensor) else tensor for slot, tensor in states.items()}


def _holds_tokens(slot: Slot, tensor: torch.Tensor) -> bool:
    return slot.kind == "conv_state" and slot.index == _TOKENS and not tensor.is_floating_point()

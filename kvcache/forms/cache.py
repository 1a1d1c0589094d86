"""Models that keep their states in transformers' `Cache`: nearly all."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn

from kvcache.recurrent import explicit_recurrences
from kvcache.states import States

# Families that number the tokens of every call from 0 when they are not told positions, as `generate()` tells them.
_COUNTS_FROM_ZERO = frozenset({"bamba"})


class CacheForm:
    """States in the layers of a `Cache`; see `kvcache.forms.StateForm`."""

    def run(self, model: nn.Module, past: States | None, **inputs: Any) -> tuple[torch.Tensor, States]:
        """See `StateForm.run`."""
        from kvcache.explicit_cache import ExplicitCache

        cache = ExplicitCache(model.config, past)
        length = max((tensor.shape[2] for slot, tensor in (past or {}).items() if slot.kind == "cache_key"), default=0)
        inputs |= _positions(model, inputs["input_ids"], length)
        with explicit_recurrences(model, cache.fetched_state):
            result = model(**{_argument(model): cache}, use_cache=True, **inputs)
        return result.logits, cache.states()

    def conversation(self, model: nn.Module, *, windowed: bool) -> CacheConversation:
        """See `StateForm.conversation`."""
        return CacheConversation(model, windowed)


class CacheConversation:
    """A model with transformers' own cache."""

    def __init__(self, model: nn.Module, windowed: bool) -> None:
        from transformers import DynamicCache

        from kvcache.explicit_cache import growing_cache

        self._model = model
        self._cache = DynamicCache(config=model.config) if windowed else growing_cache(model.config)
        self._length = 0

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `Conversation.answer`."""
        options |= {_argument(self._model): self._cache} | _positions(self._model, ids, self._length)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=True, **options).logits
        self._length += ids.shape[1]
        return logits

    def states(self) -> States:
        """See `Conversation.states`."""
        from kvcache.explicit_cache import states_of

        return states_of(self._cache)


def positions(ids: torch.Tensor, before: int) -> torch.Tensor:
    """Return the positions [1, S] of tokens [B, S] that come after `before` others."""
    return (torch.arange(ids.shape[1], device=ids.device) + before).unsqueeze(0)


def _positions(model: nn.Module, ids: torch.Tensor, before: int) -> dict[str, torch.Tensor]:
    config: Any = model.config
    return {"position_ids": positions(ids, before)} if config.model_type in _COUNTS_FROM_ZERO else {}


def _argument(model: nn.Module) -> str:
    """Return the forward's name for the cache."""
    parameters = signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"


__all__ = ["CacheConversation", "CacheForm", "positions"]

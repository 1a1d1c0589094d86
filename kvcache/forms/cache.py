"""Models that keep their states in transformers' `Cache`: nearly all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvcache.compat import cache_in, cache_keyword
from kvcache.forms.form import StateForm
from kvcache.recurrent import LastRead, explicit_recurrences
from kvcache.states.tensors import States

if TYPE_CHECKING:
    from kvcache.states.explicit_cache import ExplicitCache

# Families that number the tokens of every call from 0 when they are not told positions, as `generate()` tells them.
_COUNTS_FROM_ZERO = frozenset({"bamba", "minimax"})

# Families whose mask knows nothing of the window that their cache drops keys by: past it transformers' answer depends on how
# a text is cut into calls. The one that all cuts share with a single pass over the text is that of a cache without a window.
WINDOW_IN_CACHE_ALONE = frozenset({"moshi"})


class CacheForm(StateForm):
    """States in the layers of a `Cache`; see `kvcache.forms.StateForm`."""

    def __init__(self, windows: Mapping[int, int] | None = None) -> None:
        """Choose what sliding layers keep; see `ExplicitCache`."""
        self._windows = windows

    def cache(self, config: Any, past: States | None, last_read: LastRead) -> ExplicitCache:
        """Return the cache of one call; see `keywords`."""
        from kvcache.states.explicit_cache import ExplicitCache

        return ExplicitCache(config, past, last_read, self._windows)

    def keywords(self, model: nn.Module, past: States | None, last_read: LastRead, **inputs: Any) -> dict[str, Any]:
        """See `StateForm.keywords`."""
        length = max((tensor.shape[2] for slot, tensor in (past or {}).items() if slot.kind == "cache_key"), default=0)
        cache = {cache_keyword(model.forward): self.cache(model.config, past, last_read)}
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        return inputs | _positions(model, tokens, length) | cache | {"use_cache": True}

    def replacements(self, module: nn.Module, last_read: LastRead) -> AbstractContextManager[None]:
        """See `StateForm.replacements`."""
        return explicit_recurrences(module, last_read.take)

    def states(self, keywords: dict[str, Any]) -> States:
        """See `StateForm.states`."""
        found: States = cache_in(keywords).states()
        return found

    def conversation(self, model: nn.Module, *, windowed: bool) -> CacheConversation:
        """See `StateForm.conversation`."""
        return CacheConversation(model, windowed)


class CacheConversation:
    """A model with transformers' own cache."""

    def __init__(self, model: nn.Module, windowed: bool) -> None:
        self._model = model
        self._cache = self._own_cache(windowed)
        self._length = 0

    def _own_cache(self, windowed: bool) -> Any:
        from transformers import DynamicCache

        from kvcache.states.explicit_cache import growing_cache

        config: Any = self._model.config
        windowed = windowed and config.model_type not in WINDOW_IN_CACHE_ALONE
        return DynamicCache(config=config) if windowed else growing_cache(config)

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `Conversation.answer`."""
        options |= {cache_keyword(self._model.forward): self._cache} | _positions(self._model, ids, self._length)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=True, **options).logits
        self._length += ids.shape[1]
        return logits

    def states(self) -> States:
        """See `Conversation.states`."""
        from kvcache.states.explicit_cache import states_of

        return states_of(self._cache)


def positions(ids: torch.Tensor, before: int) -> torch.Tensor:
    """Return the positions [1, S] of tokens [B, S], or of their embeddings [B, S, D], that come after `before` others."""
    return (torch.arange(ids.shape[1], device=ids.device) + before).unsqueeze(0)


def _positions(model: nn.Module, ids: torch.Tensor, before: int) -> dict[str, torch.Tensor]:
    config: Any = model.config
    return {"position_ids": positions(ids, before)} if config.model_type in _COUNTS_FROM_ZERO else {}

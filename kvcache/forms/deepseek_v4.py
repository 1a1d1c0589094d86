"""DeepSeek-V4: layers that keep a row for each token where transformers keeps an entry for several."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvcache.attention.families import explicit_attention_families
from kvcache.forms.cache import CacheConversation, CacheForm
from kvcache.states.tensors import States


class DeepseekV4Form(CacheForm):
    """States of `kvcache.attention.compressed`; see `kvcache.forms.StateForm`."""

    def conversation(self, model: nn.Module, *, windowed: bool) -> CacheConversation:
        """See `StateForm.conversation`."""
        return _Conversation(model, windowed)


class _Conversation(CacheConversation):
    """transformers' own answers; its states are ours, from another pass over the same tokens."""

    def __init__(self, model: nn.Module, windowed: bool) -> None:
        super().__init__(model, windowed)
        self._said: list[torch.Tensor] = []

    def answer(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self._said.append(ids)
        return super().answer(ids, **options)

    def states(self) -> States:
        with torch.no_grad(), explicit_attention_families():
            return DeepseekV4Form().run(self._model, None, input_ids=torch.cat(self._said, dim=1))[1]

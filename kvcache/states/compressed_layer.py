"""What a layer of DeepSeek-V4 keeps: keys, and the rows that its entries for several tokens are made of."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class CompressedLayer(DynamicLayer):
    """Keys that are values too [B, 1, T, D], and the rows that entries and an indexer's entries are made of, each [B, T, W]."""

    keys: torch.Tensor
    is_initialized: bool
    compressor_input: torch.Tensor | None = None
    indexer_input: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys; the values are the same."""
        past = self.keys if self.is_initialized else None
        self.keys = key_states if past is None else torch.cat([past, key_states], dim=-2)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        return self.keys, self.keys

    def append(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Append rows [B, S, W] to those of a name, and return all of them."""
        past = getattr(self, name)
        every = rows if past is None else torch.cat([past, rows], dim=1)
        setattr(self, name, every)
        return every

"""transformers' own encoder-decoder asked about a source as `generate()` asks it: with its own caches, some tokens at a time.

In: a model with values, a source, tokens. Out: logits, and what the caches hold then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvcache.states.tensors import Slot
from t2n_llm.tasks.seq2seq.adapters import read_source, run_decoder
from t2n_llm.tasks.seq2seq.model import states_of_pair


class Listener:
    """transformers' model with its own caches, which has read a source."""

    def __init__(self, model: Any, inputs: Mapping[str, np.ndarray]) -> None:
        """Let a model read a source: its encoder's inputs by name, a batch of one."""
        from transformers import DynamicCache, EncoderDecoderCache

        config = model.config.get_text_config(decoder=True)
        self._model = model
        self._caches = EncoderDecoderCache(DynamicCache(config=config), DynamicCache())
        self._read = read_source(model, {name: torch.from_numpy(array) for name, array in inputs.items()})

    def answer(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits [S, vocab] of new tokens."""
        tokens = torch.tensor([list(ids)])
        result = run_decoder(self._model, self._read, tokens, cache=self._caches, use_cache=True)
        logits: np.ndarray = result.logits[0].float().numpy()
        return logits

    def states(self) -> dict[Slot, np.ndarray]:
        """Return what it keeps: its own keys and values, and those of the source."""
        return {slot: tensor.numpy() for slot, tensor in states_of_pair(self._caches).items()}


__all__ = ["Listener"]

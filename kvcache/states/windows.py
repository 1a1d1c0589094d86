"""Sliding layers that keep only what the next token can still see: the last window - 1 positions.

In: a model's config and its states as they grow. Out: the same states, cut to windows, and the cache layer that keeps them so.
The length of such a state is a symbol of its own (`W8` for windows of 8), since it stops growing while `P` goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from generic_export.errors import CaptureError
from kvcache.states.tensors import PAST, PAST_LENGTH, Slot, StateTensor, window_symbol

_KEPT_KINDS = frozenset({"cache_key", "cache_value"})


class WindowLayer(DynamicLayer):
    """Keys and values [B, Hkv, T, D] of the last `window - 1` positions."""

    is_sliding = True
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, window: int, before: int | torch.Tensor) -> None:
        """Make a layer without states.

        Args:
            window: positions that a token sees, itself included.
            before: positions before the call, dropped ones included; a number, or int64 [].
        """
        super().__init__()
        self.window = window
        self.before = before
        self.steps = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Append new positions; return all that there are, and keep the last."""
        self.steps = key_states.shape[-2]
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.keys, self.values = self._kept(keys), self._kept(values)
        return keys, values

    def _kept(self, states: torch.Tensor) -> torch.Tensor:
        total = states.shape[-2]
        # Picked, not sliced: whether a size that is not known yet is beyond the window is no question for a capture.
        last = torch.arange(total - torch.sym_min(total, self.window - 1), total, device=states.device)
        return states.index_select(-2, last)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Return how many keys the mask covers, and the position of the first."""
        kept = self.keys.shape[-2]
        return kept + query_length, self.before - kept

    def get_seq_length(self) -> Any:
        """Return the positions before the call, dropped ones included."""
        return self.before


def sliding_windows(config: Any) -> dict[int, int]:
    """Return the window of each sliding layer by its index, for models that keep their states in transformers' `Cache`."""
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError):  # configs of older families have none of the fields it reads
        return {}
    return {
        index: int(layer.sliding_window)
        for index, layer in enumerate(layers)
        if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1
    }


def cut_to_windows(states: tuple[StateTensor, ...], windows: Mapping[int, int], owner: str) -> tuple[StateTensor, ...]:
    """Return the states of a model whose sliding layers keep their window only.

    Args:
        states: of the same model where all layers keep all positions.
        windows: see `sliding_windows`.
        owner: the model's class, for the message.

    Returns:
        The states; the length of the past is one more of them where no other tells it.

    Raises:
        CaptureError: no layer slides.
    """
    cut = tuple(_cut(state, windows[state.layer]) if state.layer in windows else state for state in states)
    if not any(state.window for state in cut):
        raise CaptureError(
            f"{owner} has no sliding layer that could keep its window only.",
            "Export without --window-cache. Windows are cut where the mask has them too, so that it does not matter how a text is "
            "cut into calls.",
        )
    if any(state.grows for state in cut):
        return cut
    name = f"{PAST_LENGTH.kind}_{PAST_LENGTH.layer}"
    return (*cut, StateTensor(f"in_{name}", f"out_{name}", PAST_LENGTH.kind, PAST_LENGTH.layer, (1,), None, "i64"))


def _cut(state: StateTensor, window: int) -> StateTensor:
    if state.kind not in _KEPT_KINDS:
        return state
    shape = tuple(window_symbol(window) if dim == PAST else dim for dim in state.shape)
    return replace(state, shape=shape, window=window)


def past_length(past: Mapping[Slot, torch.Tensor], windows: Mapping[int, int]) -> int | torch.Tensor:
    """Return how many positions are before a call: the length of a state that keeps them all, or what is said of it."""
    if PAST_LENGTH in past:
        return past[PAST_LENGTH][0]
    return next(
        tensor.shape[-2] for slot, tensor in past.items() if slot.kind in _KEPT_KINDS and slot.layer not in windows
    )

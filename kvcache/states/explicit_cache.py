"""transformers' `Cache` with every state a plain tensor: put in before a call, read after it, never written in place.

Layers are transformers' own classes, in the kinds that the model's config asks for. Sliding layers keep all positions: their
window is in the attention mask, which is right at any length, while the cache keeps the one form that tract turns into engine
state (docs/contributing/engine-facts.md#cache-detection). They keep their window only where that is asked for
(`kvcache.states.windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from generic_export.errors import CaptureError
from kvcache.compat import DummyLayer
from kvcache.recurrent.last_read import LastRead
from kvcache.states.tensors import PAST_LENGTH, Slot, States
from kvcache.states.windows import WindowLayer, past_length

_ENTRIES = "compressed_kv"  # of layers with entries for several tokens (DeepSeek-V4)
_INDEX_KEYS = "idx_keys"  # of layers that choose blocks of keys (MiniMax-M3), which are not in cache_utils


class _OutOfPlace:
    """State updates of a linear-attention layer that leave the tensors they start from as they are."""

    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Append columns [B, C, S] to the state's; return all of them, keep the last `conv_kernel_size`."""
        past = self.conv_states[state_idx]
        if past is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            past = conv_states.new_zeros((*conv_states.shape[:-1], width))
        full = torch.cat([past, conv_states], dim=-1)
        self.conv_states[state_idx] = full[..., full.shape[-1] - past.shape[-1] :]
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Take a new state."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class ExplicitLinearLayer(_OutOfPlace, LinearAttentionLayer):
    """A layer of convolution and recurrent states."""


class ExplicitHybridLayer(_OutOfPlace, LinearAttentionAndFullAttentionLayer):
    """A layer that has keys and values too."""


class ExplicitCache(DynamicCache):
    """A cache between flat tensors and a model."""

    def __init__(
        self,
        config: Any,
        past: Mapping[Slot, torch.Tensor] | None = None,
        last_read: LastRead | None = None,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        """Fill the layers that a config asks for.

        Args:
            config: of the model; decides the kinds of layers.
            past: states before the call; None for none, as when a model is probed: all layers keep all positions then.
            last_read: told which recurrent state a layer reads; None for one of its own.
            windows: the window of each layer that keeps no more than that, by its index; None for none.
        """
        super().__init__()
        layers = explicit_layers(config)
        if layers is not None:
            self.layers, self.layer_class_to_replicate = layers, None
        self.last_read = last_read or LastRead()
        self._before: int | torch.Tensor = 0
        if past and windows:
            self._before = past_length(past, windows)
            for index, window in windows.items():
                self.layers[index] = WindowLayer(window, self._before)
        put_states(self, {slot: tensor for slot, tensor in (past or {}).items() if slot != PAST_LENGTH})

    def states(self) -> States:
        """Return every state, layer by layer."""
        states = states_of(self)
        if isinstance(self._before, torch.Tensor):
            steps = next(layer.steps for layer in self.layers if isinstance(layer, WindowLayer))
            states[PAST_LENGTH] = (self._before + steps).reshape(1)
        return states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return what was put in, or None."""
        state: torch.Tensor | None = self.layers[layer_idx].conv_states[state_idx]
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return what was put in, or None; a recurrence that is not handed it asks `last_read`."""
        state: torch.Tensor | None = self.layers[layer_idx].recurrent_states[state_idx]
        self.last_read.note(state)
        return state


def explicit_layers(config: Any) -> list[Any] | None:
    """Return an empty layer of the right kind for each layer of a model; None when its config does not say.

    Raises:
        CaptureError: a layer keeps its state in a class that has no translation.
    """
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError):  # configs of older families have none of the fields it reads
        return None
    return [_explicit(layer, index) for index, layer in enumerate(layers)]


def growing_cache(config: Any) -> Any:
    """Return transformers' own cache for a model, except that sliding layers keep all positions."""
    cache = DynamicCache(config=config)
    cache.layers = [_without_window(layer) for layer in cache.layers]
    return cache


def _without_window(layer: Any) -> Any:
    if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
        return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer


def _explicit(layer: Any, index: int) -> Any:
    if isinstance(layer, DummyLayer):
        return DummyLayer()
    if hasattr(layer, _ENTRIES):
        return CompressedLayer()
    if isinstance(layer, LinearAttentionLayer):
        kind = ExplicitHybridLayer if isinstance(layer, CacheLayerMixin) else ExplicitLinearLayer
        return kind(number_of_states=layer.number_of_states)
    if isinstance(layer, DynamicIndexedLayer) or (isinstance(layer, DynamicLayer) and hasattr(layer, _INDEX_KEYS)):
        return type(layer)()
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return DynamicLayer()
    raise CaptureError(
        f"layer {index} keeps its state in a {type(layer).__name__}, which is not supported.",
        "Run with --debug to see where the model uses it.",
    )


# --- slots -----------------------------------------------------------------------------------------


_SINGLE = {
    "cache_key": "keys",
    "cache_value": "values",
    "indexer_key": "indexer_keys",
    "indexer_position": "indexer_position_ids",
    "index_key": _INDEX_KEYS,
    "compressor_input": "compressor_input",
    "indexer_input": "indexer_input",
}
_NUMBERED = {"conv_state": "conv_states", "recurrent_state": "recurrent_states"}


def _tell_keys(layer: Any, _: int, tensor: torch.Tensor) -> None:
    layer.dtype, layer.device = tensor.dtype, tensor.device
    layer.is_initialized = True


def _tell_indexer_keys(layer: Any, _: int, tensor: torch.Tensor) -> None:
    layer.indexer_dtype, layer.indexer_device = tensor.dtype, tensor.device
    layer.is_indexer_initialized = True


def _tell_conv_state(layer: Any, index: int, tensor: torch.Tensor) -> None:
    layer.is_conv_states_initialized[index] = layer.has_previous_state[index] = True
    layer.conv_kernel_size[index] = tensor.shape[-1]


def _tell_recurrent_state(layer: Any, index: int, _: torch.Tensor) -> None:
    layer.is_recurrent_states_initialized[index] = layer.has_previous_state[index] = True


# What a layer must know of a state beside having it.
_TOLD: Mapping[str, Callable[[Any, int, torch.Tensor], None]] = {
    "cache_key": _tell_keys,
    "indexer_key": _tell_indexer_keys,
    "conv_state": _tell_conv_state,
    "recurrent_state": _tell_recurrent_state,
}


def put_states(cache: Cache, states: Mapping[Slot, torch.Tensor]) -> None:
    """Make tensors the states of a cache; it gets layers of plain keys and values where it has none yet."""
    for slot, tensor in states.items():
        while len(cache.layers) <= slot.layer:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[slot.layer]
        if slot.kind in _SINGLE:
            setattr(layer, _SINGLE[slot.kind], tensor)
        else:
            getattr(layer, _NUMBERED[slot.kind])[slot.index] = tensor
        if slot.kind in _TOLD:
            _TOLD[slot.kind](layer, slot.index, tensor)
    for slot, keys in states.items():
        if slot.kind == "cache_key" and cache.layers[slot.layer].values is None:  # states of no width are left out
            cache.layers[slot.layer].values = keys.new_zeros((*keys.shape[:-1], 0))


def states_of(cache: Cache) -> States:
    """Return every state of a transformers cache, layer by layer; layers that hold none are left out."""
    found: States = {}
    for index, layer in enumerate(cache.layers):
        for kind, attribute in _SINGLE.items():
            tensor = getattr(layer, attribute, None)
            if isinstance(tensor, torch.Tensor):
                found[Slot(kind, index)] = tensor
        for kind, attribute in _NUMBERED.items():
            for number, state in getattr(layer, attribute, {}).items():
                if isinstance(state, torch.Tensor):
                    found[Slot(kind, index, number)] = state
    return found


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


__all__ = ["ExplicitCache", "explicit_layers", "growing_cache", "put_states", "states_of"]

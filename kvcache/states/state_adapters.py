"""transformers' caches as a diagnosis sees them: tensors by name, a copy of the same kind, tensors put back.

In: cache classes of the installed transformers. Out: `StateAdapter`s for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from generic_export.debug.record.state import StateAdapter, register_state_adapter

# What a layer of a cache may hold, by attribute, and the axis that grows (None: a state of fixed size). An attribute may be a
# dict of such tensors, by number.
_SLOTS: Mapping[str, tuple[str, int | None]] = {
    "keys": ("key", 2),
    "values": ("value", 2),
    "cumulative_length": ("length", None),
    "conv_states": ("conv", None),
    "recurrent_states": ("recurrent", None),
    "indexer_keys": ("indexer_key", 1),
    "indexer_position_ids": ("indexer_position", 2),
}
_LINEAR = "linear_cache"  # MiniMax keeps the states of its linear layers in a list of its own
_FILLED_FLAGS = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}


def cache_adapters() -> tuple[StateAdapter, ...]:
    """Return an adapter for every kind of cache that the installed transformers has."""
    from transformers.cache_utils import Cache, EncoderDecoderCache

    from kvcache.forms.rwkv import OneLayerEach
    from kvcache.forms.xlstm import Cells, StateCell

    plain = StateAdapter(Cache, _flatten, _copy, _assign, _blank)
    double = StateAdapter(EncoderDecoderCache, _flatten_both, _copy_both, _assign_both, _blank)
    layers = StateAdapter(OneLayerEach, _flatten_layers, _copy_layers, _assign_layers)
    cell = StateAdapter(StateCell, _flatten_cell, copy.copy, _assign_cell)
    cells = StateAdapter(Cells, _flatten_cells, _copy_cells, _assign_cells)
    return plain, double, layers, cell, cells


def register_cache_adapters() -> None:
    """Make transformers' caches known to every diagnosis of this process."""
    for adapter in cache_adapters():
        register_state_adapter(adapter)


def _flatten(cache: Any) -> dict[str, torch.Tensor]:
    found = {name: tensor for index, layer in enumerate(cache.layers) for name, tensor in _slots(layer, index)}
    linear = enumerate(getattr(cache, _LINEAR, ()))
    return found | {f"linear_{index}": tensor for index, tensor in linear if isinstance(tensor, torch.Tensor)}


def _slots(layer: Any, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute, (name, _) in _SLOTS.items():
        held = getattr(layer, attribute, None)
        several = held if isinstance(held, dict) else {0: held}
        for number, tensor in several.items():
            # A layer that nothing was put in yet has no tensor, or one without a shape.
            if isinstance(tensor, torch.Tensor) and (tensor.ndim > 1 or tensor.numel()):
                yield f"{name}_{index}" if number == 0 else f"{name}.{number}_{index}", tensor


def _copy(cache: Any) -> Any:
    made = copy.copy(cache)
    made.layers = [_copy_layer(layer) for layer in cache.layers]
    if hasattr(cache, _LINEAR):
        setattr(made, _LINEAR, list(getattr(cache, _LINEAR)))
    return made


def _copy_layer(layer: Any) -> Any:
    made = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(made, name, dict(value))
    return made


def _assign(cache: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    attributes = {name: attribute for attribute, (name, _) in _SLOTS.items()}
    for name, tensor in tensors.items():
        kind, _, index = name.rpartition("_")
        kind, _, number = kind.partition(".")
        if kind == "linear":
            cache.set_linear_cache(int(index), tensor)
            continue
        while len(cache.layers) <= int(index):
            cache.layers.append(_new_layer(cache))
        _put(cache.layers[int(index)], attributes[kind], int(number or 0), tensor)


def _put(layer: Any, attribute: str, number: int, tensor: torch.Tensor) -> None:
    held = getattr(layer, attribute, None)
    if isinstance(held, dict):
        held[number] = tensor
        getattr(layer, _FILLED_FLAGS[attribute])[number] = True
    else:
        setattr(layer, attribute, tensor)
        setattr(layer, "is_indexer_initialized" if attribute.startswith("indexer") else "is_initialized", True)
    if attribute != "cumulative_length":
        layer.dtype, layer.device = tensor.dtype, tensor.device


def _new_layer(cache: Any) -> Any:
    """Return an empty layer as the cache itself would append it."""
    from transformers.cache_utils import DynamicLayer

    kind = getattr(cache, "layer_class_to_replicate", None) or DynamicLayer
    return kind()


def _blank(name: str, after: torch.Tensor) -> torch.Tensor | None:
    kind = name.rpartition("_")[0].rpartition(".")[2]
    axis = dict(_SLOTS.values()).get(kind)
    if axis is None or after.ndim <= axis:
        return None
    return after.new_empty((*after.shape[:axis], 0, *after.shape[axis + 1 :]))


def _flatten_both(cache: Any) -> dict[str, torch.Tensor]:
    own = {f"self.{name}": tensor for name, tensor in _flatten(cache.self_attention_cache).items()}
    return own | {f"cross.{name}": tensor for name, tensor in _flatten(cache.cross_attention_cache).items()}


def _copy_both(cache: Any) -> Any:
    made = copy.copy(cache)
    made.self_attention_cache = _copy(cache.self_attention_cache)
    made.cross_attention_cache = _copy(cache.cross_attention_cache)
    made.is_updated = dict(cache.is_updated)
    return made


def _assign_both(cache: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    for prefix, part in (("self.", cache.self_attention_cache), ("cross.", cache.cross_attention_cache)):
        _assign(part, {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)})


# --- what stands for the states of families without a `Cache` -----------------------------------------


def _flatten_layers(part: Any) -> dict[str, torch.Tensor]:
    return {str(layer): tensor for layer, tensor in part.of.items()}


def _copy_layers(part: Any) -> Any:
    made = copy.copy(part)
    made.of = dict(part.of)
    return made


def _assign_layers(part: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    part.of.update({int(layer): tensor for layer, tensor in tensors.items()})


def _flatten_cell(cell: Any) -> dict[str, torch.Tensor]:
    return {"value": cell.tensor}


def _assign_cell(cell: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    cell.tensor = tensors["value"]


def _flatten_cells(cells: Any) -> dict[str, torch.Tensor]:
    return {
        f"{number}_{layer}": cell.tensor
        for layer, three in cells.rnn_state.items()
        for number, cell in enumerate(three)
    }


def _copy_cells(cells: Any) -> Any:
    return replace(cells, rnn_state={layer: tuple(map(copy.copy, three)) for layer, three in cells.rnn_state.items()})


def _assign_cells(cells: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        number, _, layer = name.partition("_")
        cells.rnn_state[int(layer)][int(number)].tensor = tensor

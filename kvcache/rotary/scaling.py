"""Rotary frequencies that depend on how long the sequence is, as a choice in the graph: LongRoPE and dynamic NTK.

In: a model whose rotary modules rewrite their own buffers at run time. Out: the same model, whose modules compute the
frequencies of each call from the length of that call: past and new positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

_LONG = "long_inv_freq"


def express_length_switches(model: nn.Module) -> None:
    """Replace the forwards of a model's rotary modules where their frequencies depend on the length; in place.

    As in transformers, keys that are in the cache stay as they were turned when the length was another one.

    Args:
        model: built for one export, with the values of its buffers.
    """
    for module in list(model.modules()):
        kinds = getattr(module, "rope_type", None)
        forward = getattr(type(module).forward, "__wrapped__", None)
        if forward is None or not hasattr(module, "config") or not isinstance(kinds, str | dict):
            continue
        layer_types = [None] if isinstance(kinds, str) else list(kinds)
        switched = [each for each in layer_types if _kind(module, each) in _FREQUENCIES]
        for layer_type in switched:
            if _kind(module, layer_type) == "longrope":
                _keep_long_frequencies(module, layer_type)
        if switched:
            module.forward = partial(_forward, module, _undecorated(forward))  # type: ignore[method-assign]


def switching_length(config: Any) -> int | None:
    """Return the length beyond which LongRoPE turns all positions of a call differently; None where no length does.

    Beyond it, what a model answers depends on how a text is fed: keys stay as the call turned them that added them.

    Args:
        config: of a decoder.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]
    lengths = [each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def _undecorated(forward: Any) -> Any:
    """Return what is inside decorators (no_grad, dynamic_rope_update)."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _kind(module: Any, layer_type: str | None) -> str:
    kind = module.rope_type if layer_type is None else module.rope_type.get(layer_type, "")
    return "dynamic" if "dynamic" in str(kind) else str(kind)


def _name(name: str, layer_type: str | None) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


def _parameters(module: Any, layer_type: str | None) -> Any:
    parameters = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _keep_long_frequencies(module: Any, layer_type: str | None) -> None:
    original = _parameters(module, layer_type)["original_max_position_embeddings"]
    frequencies, _ = _initial(module, layer_type, original + 1)
    if hasattr(module, _name(_LONG, layer_type)):
        delattr(module, _name(_LONG, layer_type))
    module.register_buffer(_name(_LONG, layer_type), frequencies, persistent=False)


def _initial(module: Any, layer_type: str | None, length: Any, device: Any = None) -> Any:
    """Return frequencies and their scaling as transformers computes them for a length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    return ROPE_INIT_FUNCTIONS[rope_type](module.config, device, seq_len=length, layer_type=layer_type)


def _long_or_short(module: Any, layer_type: str | None, length: torch.Tensor) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024): one set of factors up to the length of pre-training, another one beyond."""
    original = _parameters(module, layer_type)["original_max_position_embeddings"]
    long, short = (getattr(module, _name(name, layer_type)) for name in (_LONG, "original_inv_freq"))
    return torch.where(length > original, long, short)


def _of_length(module: Any, layer_type: str | None, length: torch.Tensor) -> torch.Tensor:
    """Dynamic NTK: the base grows with the length, beyond that of pre-training."""
    frequencies: torch.Tensor = _initial(module, layer_type, length, length.device)[0]
    return frequencies


_FREQUENCIES = {"longrope": _long_or_short, "dynamic": _of_length}


class _WithFrequencies:
    """A rotary module as its own forward sees it, with the frequencies of this call."""

    def __init__(self, module: Any, **own: Any) -> None:
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _forward(module: Any, forward: Any, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    layer_type = rest[0] if rest else kwargs.get("layer_type")
    frequencies = _FREQUENCIES.get(_kind(module, layer_type))
    if frequencies is None:
        return forward(module, x, position_ids, *rest, **kwargs)
    length = position_ids.max() + 1
    own = {_name("inv_freq", layer_type): frequencies(module, layer_type, length)}
    return forward(_WithFrequencies(module, **own), x, position_ids, *rest, **kwargs)

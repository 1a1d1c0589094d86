"""Language models of `t2n-llm export` called as transformers calls them: a cache goes in and comes out as `DynamicCache`.

Such an archive takes the new tokens and, for each layer, the keys and values of the past. Positions follow from their lengths, and
every token is seen, so that a mask or positions that say otherwise are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from generic_export.errors import OptionError
from generic_export.opened_archive import OpenedArchive

_IDS, _KEY, _VALUE = "input_ids", "in_cache_key_", "in_cache_value_"


def is_language_model(archive: OpenedArchive) -> bool:
    """Say whether an archive is one of `t2n-llm export --task text-generation`, by its inputs."""
    caches = [name for name in archive.input_names if name != _IDS]
    return _IDS in archive.input_names and bool(caches) and all(name.startswith((_KEY, _VALUE)) for name in caches)


def run_language_model(archive: OpenedArchive, kwargs: Mapping[str, Any]) -> CausalLMOutputWithPast:
    """Run new tokens after those of a cache.

    Args:
        archive: of a language model.
        kwargs: `input_ids`, and what else a forward takes: `cache` (`past_key_values`), `attention_mask`, `position_ids`.

    Raises:
        OptionError: `input_ids` are missing, or tokens are hidden or moved.
        EngineError: tract does not run it.
    """
    if _IDS not in kwargs:
        raise OptionError("the program needs input_ids.", "The program computes the embeddings itself.")
    ids, cache = kwargs[_IDS], next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    past = 0 if cache is None else int(cache.get_seq_length())
    _check_mask(kwargs.get("attention_mask"))
    _check_positions(kwargs.get("position_ids"), past, ids.shape[-1])
    facts = {fact.name: fact for fact in archive.model.inputs}
    given = {_IDS: ids}
    for name in archive.input_names:
        if name != _IDS:
            given[name] = _state(cache, past, name, facts[name].shape, ids.shape[0])
    logits, *states = archive.run(given)
    layers = [int(name.removeprefix(_KEY)) for name in archive.input_names if name.startswith(_KEY)]
    found = DynamicCache()
    for place, layer in enumerate(layers):
        found.update(states[2 * place], states[2 * place + 1], layer)
    return CausalLMOutputWithPast(logits=logits, **{_cache_field(): found})


_CACHES = ("cache", "past_key_values")  # transformers 5.24 has the first name, and takes the second


def _cache_field() -> str:
    fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return next(name for name in _CACHES if name in fields)


def _state(cache: Any, past: int, name: str, shape: tuple[str, ...], batch: int) -> torch.Tensor:
    """Return keys or values of a layer, [B, heads, P, head_dim]; those of no past are empty."""
    if past == 0:
        return torch.empty(batch, int(shape[1]), 0, int(shape[3]))
    layer = cache.layers[int(name.rpartition("_")[2])]
    tensor: torch.Tensor = layer.keys if name.startswith(_KEY) else layer.values
    return tensor[..., -past:, :]


def _check_mask(mask: Any) -> None:
    if mask is not None and (mask.dim() != 2 or not bool(mask.bool().all())):
        raise OptionError(
            "attention_mask hides tokens, which this program does not support.",
            "Run texts without padding, one at a time, or export with TractExporter and a mask in the example.",
        )


def _check_positions(positions: Any, past: int, new: int) -> None:
    if positions is not None and not bool((positions == torch.arange(past, past + new)).all()):
        raise OptionError(
            f"position_ids must be {past} to {past + new - 1}, which follow from the cache.",
            "Omit them, or export with TractExporter and position_ids in the example.",
        )


__all__ = ["is_language_model", "run_language_model"]

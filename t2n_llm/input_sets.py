"""The calls that a causal LM is diagnosed with: a prefill, a decode step and a chunk, of sizes that cannot be mistaken.

In: a model. Out: `ModelCalls`: keywords of three calls, and which axes are the new tokens `S` and the past ones `P`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, described

# Distinct primes: no size is another one, or the sum of two others, by accident. (new tokens, past tokens)
PREFILL, DECODE, CHUNK = (7, 0), (1, 11), (5, 13)
SIZES = (PREFILL, DECODE, CHUNK)
_STATELESS = (7, 11, 5)  # a model that keeps no state at all
_CACHE_NAMES = ("past_key_values", "cache_params", "state")


@dataclass(frozen=True)
class ModelCalls:
    """Calls of a causal LM.

    Attributes:
        keywords: of each call; caches in them are filled by the model itself, and used by one call each.
        axes: symbols of axes of its inputs, `{"input_ids": {1: "S"}}`.
        names: `prefill`, `decode`, `chunk`.
    """

    keywords: tuple[Mapping[str, Any], ...]
    axes: Mapping[str, Mapping[int, str]]
    names: tuple[str, ...]


def calls_of(model: nn.Module, *, batch: int = 1, seed: int = 0) -> ModelCalls:
    """Make the calls of a model: with the cache in the form that an export gives it, else with the model's own.

    Args:
        model: a transformers causal LM, on the CPU or the meta device.
        batch: sequences at a time.
        seed: of the tokens.

    Raises:
        CaptureError: the model does not run.
    """
    tokens = _Tokens(model, batch, seed)
    with torch.no_grad():
        plain = _plain_cache(model, tokens, CHUNK[1])
        if plain is not None:
            return _with_plain_caches(model, tokens)
        return _with_own_caches(model, tokens)


class _Tokens:
    """A seeded source of token numbers that every vocabulary has."""

    def __init__(self, model: nn.Module, batch: int, seed: int) -> None:
        config: Any = model.config
        self._vocabulary = int(getattr(config.get_text_config(decoder=True), "vocab_size", 0) or 8)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(seed)
        self._batch = batch

    def take(self, count: int) -> torch.Tensor:
        """Return int64 [batch, count]."""
        ids = torch.randint(0, self._vocabulary, (self._batch, count), generator=self._generator)
        return ids.to(self._device)


def _with_plain_caches(model: nn.Module, tokens: _Tokens) -> ModelCalls:
    keywords = []
    for steps, past in SIZES:
        cache = _plain_cache(model, tokens, past or 1)
        if past == 0:  # of no length, yet with its heads and widths: as a graph takes it
            cache = _emptied(cache)
        keywords.append({"input_ids": tokens.take(steps), "past_key_values": cache, "use_cache": True})
    axes = {"input_ids": {1: "S"}, "past_key_values.key_0": {2: "P"}}
    return ModelCalls(tuple(keywords), axes, ("prefill", "decode", "chunk"))


def _emptied(cache: Any) -> Any:
    """Return a cache like a filled one, with no positions in it."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    made = DynamicCache()
    for filled in cache.layers:
        layer = DynamicLayer()
        layer.keys, layer.values = filled.keys[:, :, :0], filled.values[:, :, :0]
        layer.dtype, layer.device, layer.is_initialized = filled.keys.dtype, filled.keys.device, True
        made.layers.append(layer)
    return made


def _plain_cache(model: nn.Module, tokens: _Tokens, length: int) -> Any | None:
    """Return a cache of plain growing layers, filled by the model; None for a model that keeps something else."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    try:
        model(input_ids=tokens.take(length), past_key_values=cache, use_cache=True)
    except Exception:  # a model whose state is another does not take this one, each in its way
        return None
    layers = list(cache.layers)
    plain = layers and all(
        type(layer) is DynamicLayer and isinstance(layer.keys, torch.Tensor) and layer.keys.ndim == 4
        for layer in layers
    )
    return cache if plain else None


def _with_own_caches(model: nn.Module, tokens: _Tokens) -> ModelCalls:
    """Return calls with whatever state the model makes itself; its prefill is given none."""
    keywords: list[dict[str, Any]] = [{"input_ids": tokens.take(PREFILL[0]), "use_cache": True}]
    for steps, past in (DECODE, CHUNK):
        found = _own_cache(model, tokens, past)
        if found is None:
            return _without_caches(tokens)
        name, cache = found
        given = {"input_ids": tokens.take(steps), name: cache, "use_cache": True}
        if not _runs(model, given):
            continue
        keywords.append(given | {name: _own_cache(model, tokens, past)[1]})  # type: ignore[index]
    if len(keywords) == 1:
        return _without_caches(tokens)
    names = ("prefill", "decode", "chunk")[: len(keywords)]
    return ModelCalls(tuple(keywords), {"input_ids": {1: "S"}}, names)


def _own_cache(model: nn.Module, tokens: _Tokens, length: int) -> tuple[str, Any] | None:
    try:
        result = model(input_ids=tokens.take(length), use_cache=True)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(
            f"{type(model).__name__} does not run in PyTorch: {described(error)}",
            "Nothing can be said of a model that does not run; look at the traceback with --debug.",
        ) from error
    found = ((name, getattr(result, name, None)) for name in _CACHE_NAMES)
    return next(((name, cache) for name, cache in found if cache is not None), None)


def _runs(model: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Say whether a model accepts a call: recurrent ones go on one token at a time, some of them."""
    try:
        model(**keywords)
    except Exception:
        return False
    return True


def _without_caches(tokens: _Tokens) -> ModelCalls:
    keywords = tuple({"input_ids": tokens.take(steps), "use_cache": False} for steps in _STATELESS)
    return ModelCalls(keywords, {"input_ids": {1: "S"}}, ("short", "long", "shorter"))


__all__ = ["CHUNK", "DECODE", "PREFILL", "ModelCalls", "calls_of"]

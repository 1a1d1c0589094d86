"""The KV cache of a decoder that speaks: as inputs and outputs of its archives, and as transformers' cache.

In: a config of transformers, or the tensors of a call. Out: `StateTensor`s, shapes by name, a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvcache.states.explicit_cache import ExplicitCache, states_of
from kvcache.states.tensors import BATCH, PAST, Slot, StateTensor
from t2n_llm.check.cache_range import largest_of_all, largest_values
from t2n_llm.tasks.speech.plan import STATE

_KINDS = ("key", "value")


def cache_states(layers: int, heads: int, width: int, of: str = "") -> tuple[StateTensor, ...]:
    """Return the cache of a decoder, keys before values of each layer.

    Args:
        layers: of the decoder.
        heads: of keys and values.
        width: of a head.
        of: is in the names of the tensors.
    """
    shape = (BATCH, heads, PAST, width)
    return tuple(
        StateTensor(
            f"{STATE}{of}{kind}_{layer}", f"out_cache_{of}{kind}_{layer}", f"cache_{kind}", layer, shape, 2, "f32"
        )
        for layer in range(layers)
        for kind in _KINDS
    )


def inputs_of(states: Sequence[StateTensor]) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of a cache by the names of its inputs, for a batch of 1."""
    return {state.input_name: (1, *state.shape[1:]) for state in states}


def handed_over(states: Sequence[StateTensor]) -> dict[str, tuple[int, ...]]:
    """Return example shapes of a cache that one part makes for another, by name."""
    return {state.input_name: tuple(size if isinstance(size, int) else 1 for size in state.shape) for state in states}


def filled_cache(config: Any, states: Sequence[torch.Tensor] = ()) -> ExplicitCache:
    """Return a cache with keys and values [1, H, P, D] of each layer, in the order of `cache_states`.

    Args:
        config: of the decoder.
        states: none for an empty cache.
    """
    slots = [Slot(f"cache_{kind}", layer) for layer in range(len(states) // 2) for kind in _KINDS]
    return ExplicitCache(config, dict(zip(slots, states, strict=True)))


def largest_in(caches: Iterable[Any]) -> dict[Slot, float]:
    """Return the largest magnitude of each state of transformers' caches."""
    return largest_of_all(
        largest_values({slot: tensor.numpy() for slot, tensor in states_of(cache).items()}) for cache in caches
    )


__all__ = ["cache_states", "filled_cache", "handed_over", "inputs_of", "largest_in"]

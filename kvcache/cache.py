"""Key/value caches between flat graph tensors and transformers' own `Cache` classes.

Every layer is a plain growing layer here, sliding ones included: their window is in the attention mask, which is right
at any length, while the cache itself keeps the one form that tract turns into engine state (facts/tract.md §4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from generic_export.errors import CaptureError


@dataclass(frozen=True)
class CacheTensor:
    """One state of the graph: an input with `past` positions, and the output with the new ones appended.

    Attributes:
        input_name, output_name: `in_cache_key_3` and `out_cache_key_3`.
        num_key_value_heads: heads of the cache (not repeated for the query heads).
        head_dim: width of a head.
        axis: the axis that grows.
    """

    input_name: str
    output_name: str
    num_key_value_heads: int
    head_dim: int
    axis: int = 2

    def shape(self, batch: int, length: int) -> tuple[int, int, int, int]:
        """Return the concrete shape [B, Hkv, length, D]."""
        return (batch, self.num_key_value_heads, length, self.head_dim)


def cache_from_tensors(tensors: Sequence[torch.Tensor]) -> Any:
    """Return a transformers `DynamicCache` whose layers hold the given past.

    Args:
        tensors: key and value of layer 0, key and value of layer 1, ...; each [B, Hkv, P, D].
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for key, value in zip(tensors[::2], tensors[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values = key, value
        layer.dtype, layer.device = key.dtype, key.device
        layer.is_initialized = True
        cache.layers.append(layer)
    return cache


def tensors_from_cache(cache: Any) -> list[torch.Tensor]:
    """Return key and value of each layer, in the order of `cache_from_tensors`."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def cache_tensors(cache: Any) -> tuple[CacheTensor, ...]:
    """Describe the states of a cache that a model has just filled.

    Raises:
        CaptureError: a layer keeps something else than one key and one value of rank 4.
    """
    described = []
    for index, layer in enumerate(cache.layers):
        for kind, tensor in (("key", getattr(layer, "keys", None)), ("value", getattr(layer, "values", None))):
            if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
                raise CaptureError(
                    f"layer {index} keeps its state in a {type(layer).__name__}, which has no {kind} of rank 4.",
                    "Recurrent and latent caches have no translation yet.",
                )
            name = f"cache_{kind}_{index}"
            described.append(CacheTensor(f"in_{name}", f"out_{name}", tensor.shape[1], tensor.shape[3]))
    return tuple(described)

"""Multi-head latent attention over the latents that the cache holds, which are never expanded (DeepSeek-V2, section 2.1.2).

transformers caches a latent and a rotated key that all heads share, and makes every head's keys and values of all of them at
every call (`expand_kv`). Those are products, k = W_uk c and v = W_uv c, so that q k = (W_uk^T q) c and sum(p v) = W_uv sum(p c):
absorbed, the first is applied to the queries and the second to what attention returns, and all heads read the one latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ABSORBED_KEYS, ABSORBED_VALUES = "absorbed_keys", "absorbed_values"
"""What the two parts of a projection are called in an archive, beside its parameter."""

_EXPANDS = "expand_kv"  # of a layer's attention, in all families with the same latents


def absorb_latents(model: nn.Module) -> int:
    """Let the layers of a model with latent attention hand what is cached to our attention as it is.

    Layers whose projection is not a plain parameter (a quantised or an adapted one) go on expanding.

    Args:
        model: runs with our attention (`kvcache.attention.operator.ATTENTION_NAME`).

    Returns:
        How many layers do.
    """
    layers = [part for part in model.modules() if hasattr(part, _EXPANDS) and _is_plain(part)]
    for layer in layers:
        setattr(layer, _EXPANDS, _as_cached)
    return len(layers)


def _as_cached(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `expand_kv`: latents [B, 1, T, rank] and the shared keys [B, 1, T, rope], as keys and values."""
    return latent, rotated


def _is_plain(layer: Any) -> bool:
    projection = getattr(layer, "kv_b_proj", None)
    if type(projection) is not nn.Linear or projection.bias is not None:
        return False
    heads, left = divmod(projection.out_features, layer.qk_nope_head_dim + layer.v_head_dim)
    return heads > 0 and left == 0


@dataclass(frozen=True)
class AbsorbedProjections:
    """What a layer's latents are expanded by, head by head, as parts of one parameter.

    Attributes:
        keys: [H, rank, nope]; makes a query over latents of one over keys.
        values: [H, v, rank]; makes a value of a mixture of latents.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def queries(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split queries [B, H, S, nope + rope] into those over latents [B, H, S, rank] and over rotated keys [B, H, S, rope]."""
        nope = self.keys.shape[-1]
        over_latents = torch.ops.t2n.grouped_linear(query[..., :nope], self.keys, ABSORBED_KEYS)
        return over_latents, query[..., nope:]

    def mixed(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the heads' results [B, H, S, v] of mixtures of latents [B, H, S, rank]."""
        result: torch.Tensor = torch.ops.t2n.grouped_linear(latents, self.values, ABSORBED_VALUES)
        return result


def absorbed_projections(layer: Any) -> AbsorbedProjections | None:
    """Return the projections of a layer that hands over latents; None for every other."""
    if getattr(layer, _EXPANDS, None) is not _as_cached:
        return None
    weight: torch.Tensor = layer.kv_b_proj.weight
    nope = layer.qk_nope_head_dim
    by_head = weight.view(-1, nope + layer.v_head_dim, weight.shape[-1])
    return AbsorbedProjections(by_head[:, :nope].transpose(1, 2), by_head[:, nope:])

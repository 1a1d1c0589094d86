"""The gated delta rule (Yang et al. 2024): a matrix state that forgets, and corrects what it answers for a key.

tract has an operator for it, `tract_transformers_gdn_recurrent`; on CPU the loop is faster
(docs/contributing/engine-facts.md#recurrent-layers). In and out as `torch_chunk_gated_delta_rule` (one decay per head) and
`chunk_kimi_delta_attention` (one per key channel) of transformers, position by position instead of in chunks of a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.recurrent.loop import over_time, swap_time

_NORM_EPS = 1e-6


def gated_delta_rule(
    past: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs, and the last state when asked.

    Args:
        past: the state that the cache holds; `initial_state` goes before it.
        query, key: [batch, S, Hk, K].
        value: [batch, S, Hv, V]; Hv is a multiple of Hk, value head h reads key head h // (Hv / Hk).
        g: logarithm of the decay, [batch, S, Hv] or, per key channel, [batch, S, Hv, K].
        beta: how much is corrected, [batch, S, Hv].
        chunk_size: means nothing here.
        initial_state: [batch, Hv, K, V], before the first position; None for zeros.
        output_final_state: return the state too.
        use_qk_l2norm_in_kernel: queries and keys are scaled to length 1.

    Returns:
        [batch, S, Hv, V] in the element type of `query`, and the state [batch, Hv, K, V] f32.
    """
    dtype, scale = query.dtype, query.shape[-1] ** -0.5
    query, key = _heads(query, value), _heads(key, value)
    query, key, value, g, beta = (tensor.float() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    state = past if initial_state is None else initial_state
    if state is None:
        state = value.new_zeros((value.shape[0], value.shape[2], key.shape[-1], value.shape[-1]))
    decay = torch.exp(g)
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    sequences = [swap_time(tensor) for tensor in (query * scale, key, value, decay, beta)]
    last, outputs = over_time(_step, [state.float()], sequences)
    return swap_time(outputs).to(dtype), last if output_final_state else None


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> Sequence[torch.Tensor]:
    """state [batch, H, K, V]; q and k [batch, H, K]; v [batch, H, V]; decay [batch, H, K or 1]; beta [batch, H]."""
    state = state * decay.unsqueeze(-1)
    known = (k.unsqueeze(-1) * state).sum(dim=-2)
    correction = (v - known) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    return state, (q.unsqueeze(-1) * state).sum(dim=-2)


def _heads(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    groups = value.shape[2] // tensor.shape[2]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=2)


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(dim=-1, keepdim=True) + _NORM_EPS)

"""Mamba-2's recurrence (Dao and Gu 2024, state space duality): one decay per head, B and C shared by groups of heads.

In and out as `mamba2_chunk_scan` of transformers, position by position instead of in chunks of a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from kvcache.recurrent.loop import over_time, swap_time


def state_space_dual(
    past: torch.Tensor | None,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - transformers' names
    B: torch.Tensor,  # noqa: N803 - transformers' names
    C: torch.Tensor,  # noqa: N803 - transformers' names
    chunk_size: int = 0,
    D: torch.Tensor | None = None,  # noqa: N803 - transformers' names
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the last state when asked.

    Args:
        past: the state that the cache holds; `initial_states` goes before it.
        hidden_states: [batch, S, H, P].
        dt: [batch, S, H].
        A: [H], negative.
        B, C: [batch, S, G, N]; H is a multiple of G, head h reads group h // (H / G).
        chunk_size: means nothing here.
        D: [H], the weight of the direct connection.
        dt_bias: [H], added to `dt`.
        initial_states: [batch, H, P, N], before the first position; None for zeros.
        dt_softplus: pass `dt` through softplus.
        dt_limit: smallest and largest step.
        return_final_states: return (outputs, state).

    Returns:
        [batch, S, H, P] f32, and the state [batch, H, P, N] f32.
    """
    batch, steps, heads, width = hidden_states.shape
    groups, size = B.shape[2:]
    inputs = hidden_states.float()
    step_size = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        step_size = functional.softplus(step_size)
    if dt_limit != (0.0, float("inf")):
        step_size = torch.clamp(step_size, *dt_limit)
    state = past if initial_states is None else initial_states
    state = inputs.new_zeros((batch, heads, width, size)) if state is None else state.float()

    split = (batch, steps, groups, heads // groups)
    decay = torch.exp(step_size * A.float()).reshape(split)
    scaled = (inputs * step_size.unsqueeze(-1)).reshape(*split, width)
    state = state.reshape(batch, groups, heads // groups, width, size)
    sequences = [swap_time(tensor) for tensor in (decay, scaled, B.float(), C.float())]
    last, outputs = over_time(_step, [state], sequences)
    result = swap_time(outputs).reshape(batch, steps, heads, width)
    if D is not None:
        result = result + inputs * D.float().unsqueeze(-1)
    return (result, last.reshape(batch, heads, width, size)) if return_final_states else result


def _step(
    state: torch.Tensor, decay: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> Sequence[torch.Tensor]:
    """state [batch, G, R, P, N]; decay [batch, G, R]; x [batch, G, R, P]; b and c [batch, G, N]."""
    state = state * decay[..., None, None] + x.unsqueeze(-1) * b[:, :, None, None, :]
    return state, (state * c[:, :, None, None, :]).sum(dim=-1)


# Mamba's selective scan (Gu and Dao 2023, algorithm 2): a diagonal state space whose step size, B and C follow the
# input.
# In and out as `mamba_selective_scan` of transformers, which however drops the state before the first position.
def selective_scan(
    past: torch.Tensor | None,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - transformers' names
    B: torch.Tensor,  # noqa: N803 - transformers' names
    C: torch.Tensor,  # noqa: N803 - transformers' names
    D: torch.Tensor | None = None,  # noqa: N803 - transformers' names
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the last state when asked.

    Args:
        past: [batch, D, N] f32, the state before the first position; None for zeros.
        hidden_states, dt: [batch, D, S].
        A: [D, N], negative.
        B, C: [batch, N, S].
        D: [D], the weight of the direct connection.
        z: [batch, D, S], a gate.
        delta_bias: [D], added to `dt`.
        delta_softplus: pass `dt` through softplus.
        return_last_state: return (outputs, state).

    Returns:
        [batch, D, S] f32, and the state [batch, D, N] f32.
    """
    inputs = hidden_states.float()
    step_size = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
    if delta_softplus:
        step_size = functional.softplus(step_size)
    if past is None:
        past = inputs.new_zeros((*inputs.shape[:2], A.shape[-1]))
    step_size, scaled, B, C = (tensor.float().permute(2, 0, 1) for tensor in (step_size, step_size * inputs, B, C))
    # For all positions at once: tract moves the product out of its loop as well, and gets the shape of this one wrong.
    decay = torch.exp(step_size.unsqueeze(-1) * A.float())
    state, outputs = over_time(_selective_step, [past.float()], [decay, scaled, B, C])
    result = outputs.permute(1, 2, 0)
    if D is not None:
        result = result + inputs * D.float()[:, None]
    if z is not None:
        result = result * functional.silu(z.float())
    return (result, state) if return_last_state else result


def _selective_step(
    state: torch.Tensor, decay: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> Sequence[torch.Tensor]:
    """state and decay [batch, D, N]; x = dt * input [batch, D]; b and c [batch, N]."""
    state = decay * state + x.unsqueeze(-1) * b.unsqueeze(1)
    return state, (state * c.unsqueeze(1)).sum(dim=-1)

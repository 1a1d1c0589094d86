"""Mamba's selective scan (Gu and Dao 2023, algorithm 2): a diagonal state space whose step size, B and C follow the input.

In and out as `mamba_selective_scan` of transformers, which however drops the state before the first position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from kvcache.recurrent.loop import over_time


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
    state, outputs = over_time(_step, [past.float()], [decay, scaled, B, C])
    result = outputs.permute(1, 2, 0)
    if D is not None:
        result = result + inputs * D.float()[:, None]
    if z is not None:
        result = result * functional.silu(z.float())
    return (result, state) if return_last_state else result


def _step(
    state: torch.Tensor, decay: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> Sequence[torch.Tensor]:
    """state and decay [batch, D, N]; x = dt * input [batch, D]; b and c [batch, N]."""
    state = decay * state + x.unsqueeze(-1) * b.unsqueeze(1)
    return state, (state * c.unsqueeze(1)).sum(dim=-1)

"""The short causal convolution in front of a recurrence, over inputs that already carry the columns before them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def short_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return one output for each position that sees a whole kernel.

    The caller keeps the last S of them. transformers' `causal_conv1d_fn` pads on the left and computes one for each column of
    the state as well, which nobody reads.

    Args:
        hidden_states: [batch, C, K + S], the state's K columns first.
        weight: [C, K].
        bias: [C].
        activation: name of a transformers activation.

    Returns:
        [batch, C, S + 1].
    """
    from transformers.activations import ACT2FN

    result = functional.conv1d(hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    if activation is not None:
        result = ACT2FN[activation](result)
    return result.to(hidden_states.dtype)

"""The short causal convolution in front of a recurrence, over inputs that already carry the columns before them.

It is written as its taps: shifted columns times their weights, summed. tract computes a depthwise convolution over a length that is
a symbol as a product for each channel (Im2col, docs/contributing/engine-facts.md#depthwise-convolutions), which took more than half
of a decoding step of Mamba.
"""

from __future__ import annotations

from typing import Any

import torch


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

    result = summed_taps(hidden_states.to(weight.dtype), weight, bias)
    if activation is not None:
        result = ACT2FN[activation](result)
    return result.to(hidden_states.dtype)


def summed_taps(columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what `conv1d` does with a kernel of its own for each channel.

    Args:
        columns: [batch, C, K - 1 + N].
        weight: [C, K], of a few taps.
        bias: [C].

    Returns:
        [batch, C, N].
    """
    taps = weight.shape[-1]
    length = columns.shape[-1] - taps + 1
    summed = columns[..., :length] * weight[:, :1]
    for tap in range(1, taps):
        summed = summed + columns[..., tap : tap + length] * weight[:, tap : tap + 1]
    return summed if bias is None else summed + bias.unsqueeze(-1)

"""Hyper-connections (DeepSeek-V4): the normalization of their mixing matrices as one operator.

transformers writes 20 rounds out for each connection, 230 of the 650 operators of a layer, which PyTorch traces one by one. The
graph has them all the same.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from unittest import mock

import torch

from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates


@torch.library.custom_op("t2n::sinkhorn", mutates_args=())
def sinkhorn(matrix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Divide rows, then columns, by their sums, several times (Sinkhorn and Knopp 1967).

    Args:
        matrix: float [..., N, N], positive.
        rounds: how often.
        eps: added to each sum.

    Returns:
        A matrix of the same shape whose rows and columns sum to about 1.
    """
    matrix = matrix.clone()  # also of no round: an operator returns a tensor of its own
    for _ in range(rounds):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


@sinkhorn.register_fake
def _(matrix: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(matrix)


@translates(torch.ops.t2n.sinkhorn.default)
def translate_sinkhorn(b: NnefBuilder, matrix: Value, rounds: int, eps: float) -> Value:
    """t2n::sinkhorn(Tensor matrix, int rounds, float eps) -> Tensor"""
    for _ in range(rounds):
        for axis in (matrix.rank - 1, matrix.rank - 2):
            total = b.reduce("sum_reduce", matrix, [axis], keepdim=True)
            matrix = b.binary("div", matrix, b.binary("add", total, b.scalar(float(eps), matrix.dtype)))
    return matrix


def mixing_weights(forward: Any) -> Any:
    """Return `DeepseekV4HyperConnection.forward` with all rounds but the first half as one operator.

    Args:
        forward: transformers' own, which ends with those rounds: it returns what they make and does not use it.
    """

    @wraps(forward)
    def replaced(self: Any, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rounds = self.hc_sinkhorn_iters - 1
        with mock.patch.object(self, "hc_sinkhorn_iters", 1):
            post, comb, collapsed = forward(self, hidden_streams)
        return post, torch.ops.t2n.sinkhorn(comb, rounds, self.hc_eps), collapsed

    return replaced


__all__ = ["mixing_weights", "sinkhorn"]

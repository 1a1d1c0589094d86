"""A weight that makes up for what its inputs have become: from altered inputs it gives nearly the outputs of the true ones.

In: pairs of inputs, with and without what was quantised in front of a linear. Out: the weight to quantise in place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quant.gptq import damp
from quant.imatrix import StatisticsAccumulator
from quant.protocol import InputStatistics

DEFAULT_RIDGE = 0.05


@dataclass
class DriftAccumulator:
    """Adds up how altered inputs x belong to true inputs y.

    Args:
        channels: K.
    """

    channels: int
    _inputs: StatisticsAccumulator = field(init=False)
    _products: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = StatisticsAccumulator(self.channels, with_hessian=True)
        self._products = torch.zeros(self.channels, self.channels)

    def add(self, altered: torch.Tensor, true: torch.Tensor) -> None:
        """Add a batch, float32 [..., K] each, row by row of the same tokens."""
        rows = altered.reshape(-1, self.channels)
        self._inputs.add(rows)
        self._products.addmm_((true.reshape(-1, self.channels) - rows).T, rows)

    def statistics(self) -> InputStatistics:
        """Return those of the altered inputs."""
        return self._inputs.statistics()

    def corrected(self, weight: torch.Tensor, ridge: float = DEFAULT_RIDGE) -> torch.Tensor:
        """Return V [N, K] that makes E|W y - V x|^2 small: W + W E[(y - x) x^T] (E[x x^T] + r I)^-1.

        Args:
            weight: W, float32 [N, K].
            ridge: what r is of the mean square of x with many tokens; few tokens say little, and K / tokens is added, so that V
                stays nearer to W.
        """
        seen = self._inputs.statistics()
        count = max(1, seen.tokens)
        assert seen.hessian is not None  # asked for above
        damped = damp(seen.hessian, ridge + self.channels / count)
        return weight + torch.linalg.solve(damped, (weight @ (self._products / count)).T).T


__all__ = ["DriftAccumulator"]

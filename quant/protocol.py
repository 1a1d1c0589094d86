"""What an algorithm that chooses quantised values looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from quant.blocks import Q4Blocks


@dataclass(frozen=True)
class InputStatistics:
    """What calibration saw of a linear layer's inputs.

    Attributes:
        mean_square: float32 [K], E[x_k^2] of each input channel.
        tokens: how many input rows were seen.
        hessian: float32 [K, K], E[x x^T], for the algorithms that compensate errors; None when not collected.
    """

    mean_square: torch.Tensor
    tokens: int
    hessian: torch.Tensor | None = None


@runtime_checkable
class Quantizer(Protocol):
    """One algorithm: a pure function of a weight and of what is known of its inputs."""

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None = None) -> Q4Blocks:
        """Choose levels and scales.

        Args:
            weight: float32 [..., K], K a multiple of 32, the input axis last.
            statistics: of the K input channels, or None when there was no calibration.
        """
        ...

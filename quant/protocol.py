"""What an algorithm that chooses quantised values looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from quant.blocks import Q4Blocks


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of a linear layer's inputs, collected by calibration.

    Attributes:
        mean_square: float32 [K], E[x_k^2] of each input channel.
        tokens: number of input rows.
        hessian: float32 [K, K], E[x x^T], for algorithms that compensate errors; None if it was not collected.
    """

    mean_square: torch.Tensor
    tokens: int
    hessian: torch.Tensor | None = None


@dataclass(frozen=True)
class PackedRows:
    """Rows as the archive holds them, and what that did to them.

    Attributes:
        data: uint8 [rows, K // 32 * 18], packed blocks.
        squared_error: sum of (w - value)^2.
        energy: sum of w^2.
    """

    data: torch.Tensor
    squared_error: float
    energy: float


@runtime_checkable
class Quantizer(Protocol):
    """A quantization algorithm: a pure function of a weight and of the statistics of its inputs."""

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None = None) -> Q4Blocks:
        """Choose levels and scales.

        Args:
            weight: float32 [..., K], K a multiple of 32, the input axis last.
            statistics: statistics of the K input channels, or None without calibration.
        """
        ...


@runtime_checkable
class RowQuantizer(Quantizer, Protocol):
    """An algorithm that also goes from values as they are stored to packed blocks in one pass, which streaming prefers."""

    def quantize_rows(self, rows: torch.Tensor, statistics: InputStatistics | None = None) -> PackedRows:
        """Choose levels and scales, the same as `quantize`.

        Args:
            rows: float [rows, K], K a multiple of 32, in any float type.
            statistics: as for `quantize`.

        Raises:
            WeightError: the rows hold inf or nan.
        """
        ...

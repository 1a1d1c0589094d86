"""Q4_0 blocks whose scales gradient descent moves, and which are always what the archive would hold.

Levels stay as they were chosen: moved in hundreds at a time they undo what error compensation made of them (docs/quantization.md).
A scale is a share of what it was at first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quant.blocks import ZERO_POINT, Q4Blocks

_LARGEST_SCALE = torch.finfo(torch.float16).max


class _Scaled(torch.autograd.Function):
    """(levels int8 [..., G, 32], scales [..., G, 1]) -> their product; what is kept for the slopes is the levels alone."""

    @staticmethod
    def forward(ctx: Any, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(levels)
        return levels.to(torch.float32).mul_(scales)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[None, torch.Tensor]:
        (levels,), (slope,) = ctx.saved_tensors, slopes
        return None, (slope * levels).sum(-1, keepdim=True)


@dataclass(frozen=True)
class LearnedBlocks:
    """The blocks of one weight while their scales are learned.

    Attributes:
        levels: int8 [..., K // 32, 32], from -8 to 7.
        shares: float32 [..., K // 32, 1], a parameter: how much each scale has changed, as a share of itself.
        first_scales: float32 [..., K // 32, 1].
    """

    levels: torch.Tensor
    shares: torch.Tensor
    first_scales: torch.Tensor

    @staticmethod
    def of(blocks: Q4Blocks) -> LearnedBlocks:
        """Begin with blocks."""
        scales = blocks.d.to(torch.float32).unsqueeze(-1)
        levels = (blocks.q.to(torch.int16) - ZERO_POINT).to(torch.int8)
        return LearnedBlocks(levels, torch.zeros_like(scales).requires_grad_(), scales)

    def values(self) -> torch.Tensor:
        """Return float32 [..., K], the values that the archive would hold."""
        values: torch.Tensor = _Scaled.apply(self.levels, self._scales())
        return values.flatten(-2)

    def blocks(self) -> Q4Blocks:
        """Return what the archive would hold."""
        return Q4Blocks((self.levels.to(torch.int16) + ZERO_POINT).to(torch.uint8), self._stored().squeeze(-1))

    def _scales(self) -> torch.Tensor:
        """Return the scales as float16 holds them; gradients pass as if it held any number."""
        return self._moved() + (self._stored().to(torch.float32) - self._moved()).detach()

    def _moved(self) -> torch.Tensor:
        return self.first_scales * (1.0 + self.shares)

    def _stored(self) -> torch.Tensor:
        return self._moved().detach().clamp(-_LARGEST_SCALE, _LARGEST_SCALE).to(torch.float16)


__all__ = ["LearnedBlocks"]

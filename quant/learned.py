"""Q4_0 blocks as parameters: levels and scales that gradient descent moves, and that are always what the archive would hold.

Levels are real numbers that are rounded in every pass, and gradients go through the rounding as if it were not there (Bengio et al.
2013, arXiv:1308.3432). A scale is a share of what it was at first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quant.blocks import ZERO_POINT, Q4Blocks
from quant.weighted_search import HIGHEST, LOWEST

_LARGEST_SCALE = torch.finfo(torch.float16).max


class _Rounded(torch.autograd.Function):
    """(levels [..., G, 32], scales [..., G, 1]) -> the values that blocks of them stand for."""

    @staticmethod
    def forward(ctx: Any, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        whole = levels.round().clamp_(LOWEST, HIGHEST)
        ctx.save_for_backward(whole.to(torch.int8), scales)
        return whole.mul_(scales)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        whole, scales = ctx.saved_tensors
        (slope,) = slopes
        return slope * scales, (slope * whole).sum(-1, keepdim=True)


@dataclass(frozen=True)
class LearnedBlocks:
    """The blocks of one weight while they are learned.

    Attributes:
        levels: float32 [..., K // 32, 32], a parameter; blocks hold the nearest whole number.
        shares: float32 [..., K // 32, 1], a parameter: how much each scale has changed, as a share of itself.
        first_scales: float32 [..., K // 32, 1].
    """

    levels: torch.Tensor
    shares: torch.Tensor
    first_scales: torch.Tensor

    @staticmethod
    def of(blocks: Q4Blocks) -> LearnedBlocks:
        """Begin with blocks, every level in the middle of what rounds to it."""
        scales = blocks.d.to(torch.float32).unsqueeze(-1)
        levels = blocks.q.to(torch.float32) - ZERO_POINT
        return LearnedBlocks(levels.requires_grad_(), torch.zeros_like(scales).requires_grad_(), scales)

    def values(self) -> torch.Tensor:
        """Return float32 [..., K], the values that the archive would hold."""
        values: torch.Tensor = _Rounded.apply(self.levels, self._scales())
        return values.flatten(-2)

    def blocks(self) -> Q4Blocks:
        """Return what the archive would hold."""
        levels = self.levels.detach().round().clamp(LOWEST, HIGHEST) + ZERO_POINT
        return Q4Blocks(levels.to(torch.uint8), self._stored().squeeze(-1))

    def _scales(self) -> torch.Tensor:
        """Return the scales as float16 holds them; gradients pass as if it held any number."""
        return self._moved() + (self._stored().to(torch.float32) - self._moved()).detach()

    def _moved(self) -> torch.Tensor:
        return self.first_scales * (1.0 + self.shares)

    def _stored(self) -> torch.Tensor:
        return self._moved().detach().clamp(-_LARGEST_SCALE, _LARGEST_SCALE).to(torch.float16)


__all__ = ["LearnedBlocks"]

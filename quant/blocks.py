"""Q4_0: groups of 32 weights along the input axis, one float16 scale each, sixteen levels.

value = (q - 8) * d, with q in 0..15. The 18-byte block is GGUF's Q4_0, byte for byte, which tract loads under the
`.dat` item type 0x3040 (tract 0.23.9, nnef/src/tensors.rs; ggml, ggml-common.h `block_q4_0`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from generic_export.nnef.dat import BLOCK_FORMATS

GROUP = 32
BLOCK_BYTES = 18
ZERO_POINT = 8

TWICE = "q4_0x2"
"""Scheme of a tensor that is stored as the sum of two: its Q4_0 blocks, and those of what they leave. 9 bits a weight."""


def scheme_bytes(scheme: str, shape: tuple[int, ...]) -> int:
    """Return what a tensor of some shape takes in a block format, or as the sum of two."""
    return 2 * BLOCK_FORMATS["q4_0"].data_size(shape) if scheme == TWICE else BLOCK_FORMATS[scheme].data_size(shape)


@dataclass(frozen=True)
class Q4Blocks:
    """Quantized values of one weight in the Q4_0 format of ggml: `(q - 8) * d`, in groups of 32.

    Attributes:
        q: uint8 [..., K // 32, 32], levels 0 to 15.
        d: float16 [..., K // 32], signed scales, as they are stored.
    """

    q: torch.Tensor
    d: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the float32 values [..., K] that the engine computes with."""
        values = (self.q.to(torch.float32) - ZERO_POINT) * self.d.to(torch.float32).unsqueeze(-1)
        return values.flatten(-2)


class StoredBlocks:
    """Base of tensor sources that stream blocks: float32 to whoever reads them, as long as their format makes them."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def nbytes(self: _InBlocks) -> int:
        return BLOCK_FORMATS[self.block_format].data_size(self.shape)


class _InBlocks(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def block_format(self) -> str: ...

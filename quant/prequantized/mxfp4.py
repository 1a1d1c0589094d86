"""MXFP4 experts, as GPT-OSS keeps them: `*_blocks` and `*_scales`.

In: the tensors. Out: float32 experts [E, K, N], the orientation of transformers' parameters. Format: blocks uint8
[E, N, K / 32, 16], two 4-bit floats (e2m1) a byte, the low half first; scales uint8 [E, N, K / 32], exponents with a bias of
127 (OCP Microscaling Formats 1.0; the GPT-OSS checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from generic_export.errors import CorruptCheckpointError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from quant.prequantized.tensors import DecodedTensor, Decoding, Layers

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES_OF_E2M1 = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
"""The value of each of the 16 codes of a 4-bit float."""

_EXPONENT_BIAS = 127
_BLOCK_BYTES = 16
_REASON = "4-bit floats do not fit the 16 equal steps of Q4_0"


def decode_mxfp4(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a checkpoint whose MXFP4 experts are float32.

    Args:
        config: not used.
        tensors: by name.

    Raises:
        MissingTensorError: blocks without scales.
        CorruptCheckpointError: their shapes do not go together.
    """
    del config
    layers = Layers(tensors)
    for name in layers.with_suffix("_blocks"):
        layers.add(_experts(name, layers.need(f"{name}_blocks"), layers.need(f"{name}_scales")), _REASON)
    return layers.decoding("mxfp4")


def _experts(name: str, blocks: TensorSource, scales: TensorSource) -> DecodedTensor:
    if len(blocks.shape) != 4 or blocks.shape[-1] != _BLOCK_BYTES or scales.shape != blocks.shape[:-1]:
        raise CorruptCheckpointError(
            f"tensor {name}: blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)} are "
            "not valid MXFP4.",
            "Download the checkpoint again.",
        )
    experts, rows, groups, _ = blocks.shape
    expert_bytes = rows * groups * _BLOCK_BYTES

    def pieces() -> Iterator[torch.Tensor]:
        exponents = read_tensor(scales)
        # One expert at a time: its axes are swapped.
        for index, packed in enumerate(row_pieces(blocks, expert_bytes, expert_bytes)):
            values = unpack_mxfp4(packed.reshape(rows, groups, _BLOCK_BYTES), exponents[index])
            yield values.T

    return DecodedTensor(name, (experts, groups * 2 * _BLOCK_BYTES, rows), pieces)


def unpack_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 values [..., G * 32] of blocks uint8 [..., G, 16] and exponents uint8 [..., G]."""
    pairs = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
    values = VALUES_OF_E2M1[pairs.to(torch.int64)]
    exponent = exponents.to(torch.int32).unsqueeze(-1) - _EXPONENT_BIAS
    return torch.ldexp(values, exponent).flatten(-2)

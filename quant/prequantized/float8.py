"""Eight-bit floats with a scale for the tensor, for each row, or for each block of it.

In: the tensors. Out: float32 weights, value = float8 * scale. Formats: `weight_scale_inv` [ceil(N / 128), ceil(K / 128)]
(DeepSeek-V3, transformers `finegrained_fp8`; despite its name it multiplies), `weight_scale` of one value or [N, 1]
(fbgemm, compressed-tensors `float-quantized`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from generic_export.errors import WeightError
from generic_export.weights.safetensors_index import UnreadableTensor
from generic_export.weights.source import FileTensor, TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from quant.prequantized.tensors import DecodedTensor, Decoding, Layers

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SCALES = ("_scale_inv", "_scale", "_weight_scale")
_ABOUT_INPUTS = ("input_scale", "activation_scale", "input_scale_ub", "weight_scale_ub")
_DEFAULT_BLOCK = (128, 128)
_REASON = "Q4_0 has no eight-bit floats"


def decode_float8(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a checkpoint whose float8 weights are float32.

    Args:
        config: `quantization_config` of config.json: `weight_block_size`.
        tensors: by name.

    Raises:
        WeightError: a scale does not fit its weight.
    """
    block = tuple(config.get("weight_block_size") or _DEFAULT_BLOCK)
    layers = Layers(tensors)
    add_float8(layers, tensors, (int(block[0]), int(block[1])))
    for name in tensors:
        if name.endswith(_ABOUT_INPUTS):
            layers.drop(name)
    return layers.decoding("fp8")


def add_float8(layers: Layers, tensors: Mapping[str, TensorSource], block: tuple[int, int] = _DEFAULT_BLOCK) -> None:
    """Add the float8 weights among a checkpoint's tensors; scales in float8 belong to other formats.

    Raises:
        WeightError: a scale does not fit its weight.
    """
    for name, tensor in tensors.items():
        if tensor.dtype in _FLOAT8 and not name.endswith(_SCALES):
            layers.drop(name)
            scale = next((found for suffix in _SCALES if (found := layers.get(name + suffix)) is not None), None)
            layers.add(float8_weight(name, tensor, scale, block), _REASON)


def float8_weight(
    name: str, stored: TensorSource, scale: TensorSource | None, block: tuple[int, int] = _DEFAULT_BLOCK
) -> DecodedTensor:
    """Return a float8 weight as float32 values.

    Args:
        name: of the result.
        stored: float8 [..., N, K].
        scale: one value, [N], [N, 1] or one value a block; None is 1.
        block: rows and columns that share a scale, for the last case.

    Raises:
        WeightError: the scale does not fit.
    """
    width = stored.shape[-1] if stored.shape else 1
    rows = math.prod(stored.shape) // max(1, width)
    matrix = stored.shape[-2] if len(stored.shape) > 1 else 1
    _check_scale(name, stored.shape, scale, block)
    stored = bytes_of(stored)
    scale = None if scale is None else bytes_of(scale)

    def pieces() -> Iterator[torch.Tensor]:
        factors = None if scale is None else read_tensor(scale).to(torch.float32)
        start = 0
        for piece in row_pieces(stored, width):
            values = piece.to(torch.float32)
            numbers = torch.arange(start, start + len(values))
            if factors is not None:
                values *= _factors(factors, numbers, matrix, width, rows, block)
            start += len(values)
            yield values

    return DecodedTensor(name, stored.shape, pieces)


def bytes_of(tensor: TensorSource) -> TensorSource:
    """Return a tensor that streams its bytes: files list float8 as not readable, since nobody else gives it a meaning."""
    if isinstance(tensor, UnreadableTensor) and tensor.dtype.is_floating_point:
        return FileTensor(tensor.name, tensor.path, tensor.offset, tensor.shape, tensor.dtype, file=tensor.file)
    return tensor


def _is_blockwise(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]) -> bool:
    if len(shape) < 2 or len(scale) != len(shape) or scale[:-2] != shape[:-2]:
        return False
    return scale[-2:] == (-(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _check_scale(name: str, shape: tuple[int, ...], scale: TensorSource | None, block: tuple[int, int]) -> None:
    if scale is None:
        return
    count = math.prod(scale.shape)
    rows = math.prod(shape[:-1])
    experts = math.prod(shape[:-2])
    if count not in (1, rows, experts) and not _is_blockwise(shape, scale.shape, block):
        raise WeightError(
            f"tensor {name}: a scale of shape {list(scale.shape)} does not fit a weight of shape {list(shape)} "
            f"in blocks of {block[0]} x {block[1]}.",
            "Supported: one scale per tensor, row or block; otherwise use the original checkpoint.",
        )


def _factors(
    factors: torch.Tensor, numbers: torch.Tensor, matrix: int, width: int, rows: int, block: tuple[int, int]
) -> torch.Tensor:
    """Return what the rows of these numbers are multiplied with, float32 that broadcasts to [rows, width]."""
    count = factors.numel()
    if count == 1:
        return factors.reshape(1, 1)
    experts, row = numbers // matrix, numbers % matrix
    blocks = (-(-matrix // block[0]), -(-width // block[1]))
    if count == rows // matrix * blocks[0] * blocks[1] and tuple(factors.shape[-2:]) == blocks:
        columns = torch.arange(width) // block[1]
        return factors.reshape(-1, *blocks)[experts, row // block[0]][:, columns]
    if count == rows:
        return factors.reshape(-1)[numbers].unsqueeze(1)
    return factors.reshape(-1)[experts].unsqueeze(1)

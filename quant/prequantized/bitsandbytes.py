"""bitsandbytes checkpoints: nf4 and fp4 (with or without doubly quantised scales), and int8.

In: the tensors. Out: float32 weights. Format of 4 bits: `weight` uint8 [N * K / 2, 1], the first value in the high half;
`weight.absmax`, the scale of each block; `weight.quant_map` float32 [16]; `weight.quant_state.bitsandbytes__nf4`, JSON as
bytes; where absmax is uint8 it stands for nested_quant_map[absmax] * nested_absmax[block] + nested_offset (bitsandbytes
`functional.py`, `QuantState.as_dict`). Of int8: `weight` int8 [N, K], `SCB` float32 [N]; value = weight * SCB / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from generic_export.errors import CorruptCheckpointError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from quant.prequantized.tensors import PIECE_VALUES, DecodedTensor, Decoding, Layers

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NOT_A_GRID = "4-bit floats do not fit the 16 equal steps of Q4_0"
_INT8 = "its integers have 8 bits, but Q4_0 has 4"
_INT8_LEVELS = 127


def decode_bitsandbytes(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a bitsandbytes checkpoint with plain weights.

    Args:
        config: not used; each tensor says itself how it is stored.
        tensors: by name.

    Raises:
        MissingTensorError: a part of a tensor is not there.
        CorruptCheckpointError: what a tensor says of itself cannot be read.
    """
    del config
    layers = Layers(tensors)
    for ending in _STATES:
        for path in layers.with_suffix(ending):
            layers.add(_four_bits(f"{path}.weight", layers, layers.need(path + ending)), _NOT_A_GRID)
    for path in layers.with_suffix(".SCB"):
        layers.drop(f"{path}.weight_format")
        layers.add(_eight_bits(f"{path}.weight", layers.need(f"{path}.weight"), layers.need(f"{path}.SCB")), _INT8)
    return layers.decoding("bitsandbytes")


def _four_bits(name: str, layers: Layers, state: TensorSource) -> DecodedTensor:
    stored, absmax = layers.need(name), layers.need(f"{name}.absmax")
    table = layers.need(f"{name}.quant_map")
    nested = None
    if absmax.dtype == torch.uint8:
        nested = (layers.need(f"{name}.nested_absmax"), layers.need(f"{name}.nested_quant_map"))
    try:
        said: dict[str, Any] = json.loads(read_tensor(state).numpy().tobytes())
        shape = tuple(int(size) for size in said["shape"])
        block, nested_block = int(said["blocksize"]), int(said.get("nested_blocksize") or 0)
        offset = float(said.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"tensor {name}: its bitsandbytes state cannot be read ({error!r}).", "Download the checkpoint again."
        ) from error
    values = math.prod(shape)
    if (
        math.prod(stored.shape) * 2 not in (values, values + 1)
        or block <= 0
        or block % 2
        or (nested and not nested_block)
    ):
        raise CorruptCheckpointError(
            f"tensor {name}: {math.prod(stored.shape)} bytes do not match {list(shape)} values in blocks of {block}.",
            "Download the checkpoint again.",
        )

    def pieces() -> Iterator[torch.Tensor]:
        scales = _scales(absmax, nested, nested_block, offset)
        levels = read_tensor(table).to(torch.float32)
        start = 0
        for piece in row_pieces(stored, 1, PIECE_VALUES // block * block // 2):
            packed = piece.reshape(-1)
            pairs = torch.stack((packed >> 4, packed & 0x0F), dim=-1).reshape(-1)[: values - start]
            blocks = torch.arange(start, start + len(pairs)) // block
            start += len(pairs)
            yield levels[pairs.to(torch.int64)] * scales[blocks]

    return DecodedTensor(name, shape, pieces)


def _scales(
    absmax: TensorSource, nested: tuple[TensorSource, TensorSource] | None, nested_block: int, offset: float
) -> torch.Tensor:
    """Return the scale of each block, float32."""
    stored = read_tensor(absmax).reshape(-1)
    if nested is None:
        return stored.to(torch.float32)
    outer, table = (read_tensor(source).to(torch.float32).reshape(-1) for source in nested)
    return table[stored.to(torch.int64)] * outer[torch.arange(len(stored)) // nested_block] + offset


def _eight_bits(name: str, stored: TensorSource, scale: TensorSource) -> DecodedTensor:
    if len(stored.shape) != 2 or math.prod(scale.shape) != stored.shape[0]:
        raise CorruptCheckpointError(
            f"tensor {name}: {math.prod(scale.shape)} scales do not fit shape {list(stored.shape)}.",
            "Download the checkpoint again.",
        )

    def pieces() -> Iterator[torch.Tensor]:
        scales = read_tensor(scale).to(torch.float32).reshape(-1, 1)
        start = 0
        for piece in row_pieces(stored, stored.shape[1]):
            yield piece.to(torch.float32) * scales[start : (start := start + len(piece))] / _INT8_LEVELS

    return DecodedTensor(name, stored.shape, pieces)

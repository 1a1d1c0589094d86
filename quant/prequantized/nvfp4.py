"""NVFP4 weights of compressed-tensors (`nvfp4-pack-quantized`) and of ModelOpt (`quant_algo: NVFP4`).

In: the tensors. Out: weights [N, K] in float32. Format: uint8 [N, K / 2], two 4-bit floats (e2m1) a byte, the low half first; a
scale in float8 (e4m3) for each 16 values of a row, [N, K / 16]; and one float32 scale of the tensor, by which compressed-tensors
divides (`weight_global_scale`) and ModelOpt multiplies (`weight_scale_2`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from quant.prequantized.mxfp4 import VALUES_OF_E2M1
from quant.prequantized.tensors import DecodedTensor, Decoding, Layers

_GROUP = 16
_REASON = "4-bit floats lie on no grid of 16 equal steps"


def decode_packed_nvfp4(tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a checkpoint of compressed-tensors with plain weights.

    Args:
        tensors: by name.

    Raises:
        MissingTensorError: a scale is not there.
        CorruptCheckpointError: shapes do not go together.
    """
    layers = Layers(tensors)
    for path in layers.with_suffix(".weight_packed"):
        packed, scales = layers.need(f"{path}.weight_packed"), layers.need(f"{path}.weight_scale")
        layers.add(_weight(path, packed, scales, layers.need(f"{path}.weight_global_scale"), divides=True), _REASON)
    return _without(layers, ".input_global_scale")


def decode_modelopt(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a checkpoint of ModelOpt with plain weights.

    Args:
        config: `quantization_config` of config.json: `quant_algo`.
        tensors: by name.

    Raises:
        WeightError: the algorithm is another one than NVFP4.
        MissingTensorError: a scale is not there.
        CorruptCheckpointError: shapes do not go together.
    """
    algorithm = config.get("quant_algo")
    if algorithm != "NVFP4":
        raise WeightError(f"ModelOpt: quant_algo {algorithm!r} cannot be read.", "Known: NVFP4.")
    layers = Layers(tensors)
    for path in layers.with_suffix(".weight_scale_2"):
        packed, scales = layers.need(f"{path}.weight"), layers.need(f"{path}.weight_scale")
        layers.add(_weight(path, packed, scales, layers.need(f"{path}.weight_scale_2"), divides=False), _REASON)
    return _without(layers, ".input_scale", ".k_scale", ".v_scale")


def _without(layers: Layers, *endings: str) -> Decoding:
    """Return the checkpoint without what is about activations and caches."""
    for ending in endings:
        for path in layers.with_suffix(ending):
            layers.drop(path + ending)
    return layers.decoding("nvfp4")


def _weight(
    path: str, packed: TensorSource, scales: TensorSource, scale: TensorSource, *, divides: bool
) -> DecodedTensor:
    shape, groups = tuple(packed.shape), tuple(scales.shape)
    if len(shape) != 2 or packed.dtype is not torch.uint8 or groups != (shape[0], 2 * shape[1] // _GROUP):
        raise CorruptCheckpointError(
            f"tensor {path}.weight: {list(shape)} bytes and scales of shape {list(groups)} are no NVFP4.",
            "Download the checkpoint again.",
        )
    rows, width = shape

    def pieces() -> Iterator[torch.Tensor]:
        whole = read_tensor(scale).to(torch.float32).reshape(())
        each = read_tensor(scales).to(torch.float32)
        each = each / whole if divides else each * whole
        start = 0
        for piece in row_pieces(packed, width):
            here = slice(start, start := start + len(piece))
            codes = torch.stack((piece & 0x0F, piece >> 4), dim=-1).flatten(-2).to(torch.int64)
            yield (VALUES_OF_E2M1[codes].unflatten(1, (-1, _GROUP)) * each[here].unsqueeze(-1)).flatten(1)

    return DecodedTensor(f"{path}.weight", (rows, 2 * width), pieces)

"""HQQ checkpoints in safetensors: `W_q`, `scale`, `zero` of each layer, and what describes them as small tensors.

In: the tensors. Out: float32 weights, value = (level - zero) * scale. The levels of a weight are a matrix: rows of
`group_size` (axis 1) or columns of it (axis 0). Packed in uint8 (`8bit_u8`, `4bit_u8`, `2bit_u8`, `1bit_u8`): byte [i, j] holds
rows i, i + n, i + 2n, ... of the n * 8 / bits rows, the first one in the highest bits (hqq `core/bitpack.py`,
`core/quantize.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor
from quant.prequantized.tensors import DecodedTensor, Decoding, Layers

_PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "2bit_u8": 2, "1bit_u8": 1}
_PARTS = (
    *("channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta", "optimize"),
    *("quant_scale", "quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype", "view_as_float"),
)
_REASON = "its zero points are not integers"


def decode_hqq(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return an HQQ checkpoint with plain weights.

    Args:
        config: not used; each layer says itself how it is stored.
        tensors: by name.

    Raises:
        WeightError: a packing that is not supported (3 bits), or scales that are quantised themselves.
        MissingTensorError: a part of a layer is not there.
        CorruptCheckpointError: the parts do not fit together.
    """
    del config
    layers = Layers(tensors)
    for path in layers.with_suffix(".W_q"):
        layers.add(_weight(path, layers), _REASON)
        for part in _PARTS:
            layers.drop(f"{path}.{part}")
    return layers.decoding("hqq")


def _weight(path: str, layers: Layers) -> DecodedTensor:
    stored, scale, zero = (layers.need(f"{path}.{part}") for part in ("W_q", "scale", "zero"))
    shape = tuple(int(size) for size in read_tensor(layers.need(f"{path}.shape")).tolist())
    packing = bytes(read_tensor(layers.need(f"{path}.packing")).to(torch.uint8).tolist()).decode("ascii", "replace")
    axis = int(read_tensor(layers.need(f"{path}.axis")).item())
    if packing not in _PACKINGS or stored.dtype != torch.uint8:
        raise WeightError(
            f"tensor {path}.W_q: HQQ packing {packing!r} in {stored.dtype} is not supported.",
            f"Supported: {', '.join(_PACKINGS)} in uint8; otherwise use the original checkpoint.",
        )
    if scale.dtype == torch.uint8:
        raise WeightError(
            f"tensor {path}.scale: quantized HQQ scales are not supported.", "Use the original checkpoint."
        )
    bits = _PACKINGS[packing]
    groups = math.prod(scale.shape)
    levels = math.prod(stored.shape) * 8 // bits
    if axis not in (0, 1) or not groups or levels < math.prod(shape) or math.prod(shape) % groups:
        raise CorruptCheckpointError(
            f"tensor {path}.W_q: {levels} levels and {groups} scales do not fit shape {list(shape)} along axis {axis}.",
            "Download the checkpoint again.",
        )

    def pieces() -> Iterator[torch.Tensor]:
        length = math.prod(shape) // groups
        rows = groups if axis == 1 else length
        # A byte holds rows that lie far apart, so that a weight is unpacked whole.
        matrix = _unpack(read_tensor(stored), bits)[:rows].to(torch.float32)
        side = (-1, 1) if axis == 1 else (1, -1)
        zeros, scales = (read_tensor(part).to(torch.float32).reshape(side) for part in (zero, scale))
        yield ((matrix - zeros) * scales).reshape(shape)

    return DecodedTensor(f"{path}.weight", shape, pieces)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = range(8 - bits, -1, -bits)
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in shifts], dim=0)

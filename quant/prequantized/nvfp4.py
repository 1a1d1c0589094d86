"""NVFP4 weights: 4-bit floats with a scale in float8 for each 16 of them, and one scale of the tensor.

In: the tensors of a layer. Out: its weight in float32. Format: uint8 [..., N, K / 2], two 4-bit floats (e2m1) a byte, the low half
first; scales in float8 (e4m3) [..., N, K / 16]; and float32 scales, one for the tensor or for each expert, by which
compressed-tensors divides (`weight_global_scale`) and ModelOpt multiplies (`weight_scale_2`). ModelOpt stores experts in one
tensor with both axes swapped: [E, K / 2, N] and [E, K / 16, N].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from generic_export.errors import CorruptCheckpointError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from quant.prequantized.float8 import bytes_of
from quant.prequantized.mxfp4 import VALUES_OF_E2M1
from quant.prequantized.tensors import DecodedTensor, Layers

GROUP = 16
REASON = "4-bit floats do not fit the 16 equal steps of Q4_0"


def add_packed_nvfp4(layers: Layers) -> None:
    """Add the weights of compressed-tensors (`nvfp4-pack-quantized`), with or without scales of activations.

    Raises:
        MissingTensorError: a scale is not there.
        CorruptCheckpointError: shapes do not go together.
    """
    for path in layers.with_suffix(".weight_packed"):
        packed, scales = layers.need(f"{path}.weight_packed"), layers.need(f"{path}.weight_scale")
        scale = layers.need(f"{path}.weight_global_scale")
        layers.add(nvfp4_weight(f"{path}.weight", packed, scales, scale, divides=True), REASON)


def nvfp4_weight(
    name: str,
    packed: TensorSource,
    scales: TensorSource,
    scale: TensorSource,
    *,
    divides: bool = False,
    inputs: TensorSource | None = None,
) -> DecodedTensor:
    """Return a weight as float32 values.

    Args:
        name: of the result.
        packed: uint8 [N, K / 2], [E, N, K / 2] or [E, K / 2, N].
        scales: float8 e4m3, [N, K / 16], [E, N, K / 16] or [E, K / 16, N].
        scale: of the tensor, one value, or one of each expert.
        divides: whether the tensor's scale divides, as in compressed-tensors.
        inputs: [K], what the layer's input is multiplied with (AWQ's `pre_quant_scale`), or None.

    Raises:
        CorruptCheckpointError: shapes do not go together.
    """
    shape, groups = tuple(packed.shape), tuple(scales.shape)
    whole = shape[-1:] != () and groups == (*shape[:-1], 2 * shape[-1] // GROUP)
    swapped = len(shape) == 3 and not whole and groups == (shape[0], 2 * shape[1] // GROUP, shape[2])
    experts = shape[0] if len(shape) == 3 else 1
    counts = (1, experts)
    if (
        packed.dtype is not torch.uint8
        or len(shape) not in (2, 3)
        or not (whole or swapped)
        or _count(scale) not in counts
        or (inputs is not None and (len(shape) != 2 or _count(inputs) != 2 * shape[1]))
    ):
        raise CorruptCheckpointError(
            f"tensor {name}: {list(shape)} bytes and scales of shape {list(groups)} are not valid NVFP4.",
            "Download the checkpoint again.",
        )
    each_bytes = shape[-2] * shape[-1]
    scales = bytes_of(scales)

    def pieces() -> Iterator[torch.Tensor]:
        factors = read_tensor(scales).to(torch.float32).reshape(experts, *groups[-2:])
        of_tensor = read_tensor(scale).to(torch.float32).reshape(-1, 1, 1)
        factors = factors / of_tensor if divides else factors * of_tensor
        columns = None if inputs is None else read_tensor(inputs).to(torch.float32).reshape(1, -1)
        if swapped:  # one expert at a time: its axes are swapped
            for index, data in enumerate(row_pieces(packed, each_bytes, each_bytes)):
                yield _values(data.reshape(shape[1:]).T, factors[index].T).T
            return
        rows, start = factors.flatten(0, 1), 0
        for data in row_pieces(packed, shape[-1]):
            values = _values(data, rows[start : start + len(data)])
            yield values if columns is None else values * columns
            start += len(data)

    width = (2 * shape[1], shape[2]) if swapped else (shape[-2], 2 * shape[-1])
    return DecodedTensor(name, (*shape[:-2], *width), pieces)


def _values(packed: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, K] of bytes [N, K / 2] and factors [N, K / 16]."""
    codes = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2).to(torch.int64)
    return (VALUES_OF_E2M1[codes].unflatten(1, (-1, GROUP)) * factors.unsqueeze(-1)).flatten(1)


def _count(tensor: TensorSource) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count

"""compressed-tensors checkpoints (llm-compressor, vLLM): packed integers, plain int8, or float8.

In: the quantization config and the tensors. Out: weights [N, K]. Format `pack-quantized`: weight_packed int32
[N, ceil(K * bits / 32)], levels plus 2^(bits - 1), along K; weight_scale [N, G]; weight_shape int64 [2];
weight_zero_point int32 [ceil(N * bits / 32), G] where asymmetric, packed along N; weight_g_idx int32 [K] where in activation
order (compressed-tensors `compressors/quantized_compressors/pack_quantized.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor, row_pieces
from quant.prequantized.float8 import add_float8, decode_float8
from quant.prequantized.grouped import WORD_BITS, GroupedWeight, check_bits, unpack_words
from quant.prequantized.nvfp4 import add_packed_nvfp4
from quant.prequantized.tensors import DecodedTensor, Decoding, Layers

_PACKED = "pack-quantized"
_INTEGERS = ("int-quantized", "naive-quantized")
_FLOATS = ("float-quantized",)
_NVFP4 = "nvfp4-pack-quantized"
_MIXED = "mixed-precision"
_MIXED_FORMS = (*_FLOATS, _NVFP4)
_DENSE = "dense"
_NOT_WEIGHTS = (".input_scale", ".input_zero_point", ".input_global_scale", ".q_scale", ".k_scale", ".v_scale")


def decode_compressed_tensors(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a compressed-tensors checkpoint with plain weights.

    Args:
        config: `quantization_config` of config.json: `format`, `config_groups`.
        tensors: by name.

    Raises:
        WeightError: the format, or the width of its integers, is not supported; or a sparsity format is used as well.
        MissingTensorError: a part of a layer is not there.
    """
    sparsity = (config.get("sparsity_config") or {}).get("format", _DENSE)
    if sparsity != _DENSE:
        raise WeightError(
            f"compressed-tensors: sparse weights ({sparsity}) cannot be read.", "Give a dense checkpoint."
        )
    form = config.get("format")
    if form in _FLOATS:
        return decode_float8(_block_size(config), tensors)
    if form == _NVFP4 or (form == _MIXED and set(_forms(config)) <= set(_MIXED_FORMS)):
        return _floats(tensors)
    if form not in (_PACKED, *_INTEGERS):
        known = ", ".join((_PACKED, *_INTEGERS, *_FLOATS, _NVFP4))
        raise WeightError(f"compressed-tensors: format {form!r} cannot be read.", f"Known: {known}.")
    layers = Layers(tensors)
    bits = _bits(config)
    for path in layers.with_suffix(".weight_packed"):
        layers.add(*_packed(path, layers, bits).source())
    for path in layers.with_suffix(".weight_scale"):
        weight = tensors.get(f"{path}.weight")
        if weight is not None and weight.dtype == torch.int8:
            layers.add(_int8(path, layers), "its integers have 8 bits, Q4_0 has 4")
    return _without_activations(layers, "compressed-tensors")


def _floats(tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a checkpoint of 4-bit floats, and of 8-bit floats where it is mixed."""
    layers = Layers(tensors)
    add_packed_nvfp4(layers)
    add_float8(layers, tensors)
    return _without_activations(layers, "nvfp4")


def _without_activations(layers: Layers, name: str) -> Decoding:
    """Return the checkpoint without what is about activations and caches."""
    for ending in _NOT_WEIGHTS:
        for path in layers.with_suffix(ending):
            layers.drop(path + ending)
    return layers.decoding(name)


def _forms(config: Mapping[str, Any]) -> list[str]:
    """Return the formats of a checkpoint that mixes them, by group."""
    groups = (config.get("config_groups") or {}).values()
    return [str(group.get("format")) for group in groups if isinstance(group, Mapping)]


def _weight_args(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = (config.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if isinstance(group, Mapping) and group.get("weights")]


def _bits(config: Mapping[str, Any]) -> int:
    widths = {args.get("num_bits") for args in _weight_args(config)}
    if len(widths) != 1:
        raise WeightError(
            f"compressed-tensors: config_groups name {len(widths)} widths of weights, one is expected.",
            "Give the original checkpoint.",
        )
    return check_bits(widths.pop(), "compressed-tensors")


def _block_size(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = [args["block_structure"] for args in _weight_args(config) if args.get("block_structure")]
    return {"weight_block_size": sizes[0]} if sizes else {}


def _packed(path: str, layers: Layers, bits: int) -> GroupedWeight:
    words, scales = layers.need(f"{path}.weight_packed"), layers.need(f"{path}.weight_scale")
    shape = read_tensor(layers.need(f"{path}.weight_shape")).tolist()
    if len(shape) != 2 or shape[0] != words.shape[0] or -(-shape[1] * bits // WORD_BITS) != words.shape[1]:
        raise CorruptCheckpointError(
            f"tensor {path}.weight_packed: shape {list(words.shape)} does not hold {shape} values of {bits} bits.",
            "Download the checkpoint again.",
        )
    outputs, inputs = int(shape[0]), int(shape[1])
    zeros, g_idx = layers.get(f"{path}.weight_zero_point"), layers.get(f"{path}.weight_g_idx")
    order = None if g_idx is None else read_tensor(g_idx).to(torch.int64)
    return GroupedWeight(
        f"{path}.weight",
        (outputs, inputs),
        bits,
        scales=lambda: read_tensor(scales).reshape(outputs, -1),
        zeros=None if zeros is None else lambda: unpack_words(read_tensor(zeros), bits, 0)[:outputs],
        levels=lambda: _rows(read_tensor(words), bits, inputs),
        group_of=None if order is None or bool((order < 0).any()) else order,  # -1: no order was chosen
    )


def _rows(words: torch.Tensor, bits: int, inputs: int) -> Callable[[slice], torch.Tensor]:
    return lambda rows: unpack_words(words[rows], bits, 1)[:, :inputs]


def _int8(path: str, layers: Layers) -> DecodedTensor:
    stored, scale = layers.need(f"{path}.weight"), layers.need(f"{path}.weight_scale")
    zero = layers.get(f"{path}.weight_zero_point")
    rows, width = stored.shape

    def pieces() -> Iterator[torch.Tensor]:
        scales = _by_row(scale, rows)
        zeros = None if zero is None else _by_row(zero, rows)
        start = 0
        for piece in row_pieces(stored, width):
            here = slice(start, start := start + len(piece))
            levels = piece.to(torch.float32).unflatten(1, (scales.shape[1], -1))
            if zeros is not None:
                levels -= zeros[here].unsqueeze(-1)
            yield (levels * scales[here].unsqueeze(-1)).flatten(1)

    return DecodedTensor(f"{path}.weight", stored.shape, pieces)


def _by_row(source: TensorSource, rows: int) -> torch.Tensor:
    """Return one value a row and group, float32 [rows, G], of a tensor of one value, one a row, or [rows, G]."""
    values = read_tensor(source).to(torch.float32)
    return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values.reshape(rows, -1)

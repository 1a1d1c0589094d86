"""Quantised tensors as torch.export writes them: `quantized_decomposed` operators around float ones.

A quantised value is a plain tensor of integers; a dequantised one remembers them (`builder.quantised`), so that the layer
behind it can compute on integers (`integer_products.py`) and a second quantisation to the same grid costs nothing.
"""

from __future__ import annotations

import torch

from generic_export.compat import quantized_decomposed
from generic_export.errors import TranslationError
from generic_export.translate.builder import NnefBuilder, QuantisedTensor, Value
from generic_export.translate.registry import translates

quantized = quantized_decomposed()

# What PyTorch's 8-bit backends know; wider integers have no kernels in tract, narrower ones live in 8 bits.
_NAMES = {torch.int8: "i8", torch.uint8: "u8"}


@translates(quantized.quantize_per_tensor.default)
def quantize_per_tensor(
    b: NnefBuilder, input: Value, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Value:
    """quantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype)"""
    _require_bytes(dtype)
    known = b.quantised.get(input.number)
    if known is not None and _same_grid(known, scale, zero_point, quant_min, quant_max, dtype):
        return known.integers
    inverse = b.scalar(1.0 / scale, torch.float32)
    return _rounded(
        b, b.binary("mul", input, inverse), b.scalar(float(zero_point), torch.float32), quant_min, quant_max, dtype
    )


@translates(quantized.quantize_per_channel.default)
def quantize_per_channel(
    b: NnefBuilder,
    input: Value,
    scales: Value,
    zero_points: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Value:
    """quantize_per_channel(Tensor input, Tensor scales, Tensor zero_points, int axis, int quant_min, int quant_max, ...)"""
    _require_bytes(dtype)
    inverse = _along(b, b.unary("recip", b.cast(scales, torch.float32)), axis, input.rank)
    offsets = _along(b, b.cast(zero_points, torch.float32), axis, input.rank)
    return _rounded(b, b.binary("mul", input, inverse), offsets, quant_min, quant_max, dtype)


@translates(quantized.dequantize_per_tensor.default)
def dequantize_per_tensor(
    b: NnefBuilder,
    input: Value,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """dequantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype, ...)"""
    _require_bytes(dtype)
    centred = b.cast(input, torch.float32)
    if zero_point:
        centred = b.binary("sub", centred, b.scalar(float(zero_point), torch.float32))
    value = b.binary("mul", centred, b.scalar(float(scale), torch.float32))
    remembered = QuantisedTensor(input, float(scale), int(zero_point), None, (quant_min, quant_max))
    return _dequantised(b, value, remembered, out_dtype)


@translates(quantized.dequantize_per_channel.default)
def dequantize_per_channel(
    b: NnefBuilder,
    input: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """dequantize_per_channel(Tensor input, Tensor scales, Tensor? zero_points, int axis, int quant_min, int quant_max, ...)"""
    _require_bytes(dtype)
    centred = b.cast(input, torch.float32)
    if zero_points is not None:
        centred = b.binary("sub", centred, _along(b, b.cast(zero_points, torch.float32), axis, input.rank))
    value = b.binary("mul", centred, _along(b, b.cast(scales, torch.float32), axis, input.rank))
    remembered = QuantisedTensor(input, scales, zero_points, axis % input.rank, (quant_min, quant_max))
    return _dequantised(b, value, remembered, out_dtype)


def _rounded(b: NnefBuilder, scaled: Value, offset: Value, quant_min: int, quant_max: int, dtype: torch.dtype) -> Value:
    """Round halves to even, then move to the zero point and clamp: PyTorch's order."""
    moved = b.binary("add", b.unary("tract_core_round_even", scaled), offset)
    low, high = (b.scalar(float(bound), torch.float32) for bound in (quant_min, quant_max))
    # Already between the bounds of the type: no detour for what would wrap.
    clamped = b.binary("min", b.binary("max", moved, low), high)
    return b.emit("tract_core_cast", [clamped], shape=clamped.shape, dtype=dtype, attributes={"to": _NAMES[dtype]})


def _dequantised(b: NnefBuilder, value: Value, remembered: QuantisedTensor, dtype: torch.dtype | None) -> Value:
    b.quantised[value.number] = remembered
    return value if dtype is None else b.cast(value, dtype)


def _same_grid(
    known: QuantisedTensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> bool:
    wanted = (None, scale, zero_point, (quant_min, quant_max), dtype)
    return (known.axis, known.scale, known.zero_point, known.bounds, known.integers.dtype) == wanted


def _along(b: NnefBuilder, value: Value, axis: int, rank: int) -> Value:
    """Return a vector of one number per channel with the rank of the tensor whose channels they are."""
    place = axis % rank
    return b.unsqueeze(value, [other for other in range(rank) if other != place])


def _require_bytes(dtype: torch.dtype) -> None:
    if dtype not in _NAMES:
        raise TranslationError(
            f"quantized to {dtype}: only 8 bits are supported.", "Quantize to torch.int8 or torch.uint8."
        )

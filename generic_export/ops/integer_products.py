"""Layers on dequantised values, computed on the integers themselves: tract's 8-bit kernels, sums in i32.

In: float values that `quantised.py` made from integers. Out: the same float results, or None where the integers do not help.
Not through `graph.quant`: it has no scale per channel, and a cast of a float to its types does not divide by the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from generic_export.nnef.graph import Argument
from generic_export.torch_graph.dims import Dim
from generic_export.translate.builder import NnefBuilder, QuantisedTensor, Value

_BATCH_LETTERS = "abcdefgh"

# What moves elements without looking at them.
_MOVING = frozenset({"reshape", "squeeze", "unsqueeze", "transpose", "slice"})


def integer_linear(b: NnefBuilder, input: Value, weight: Value, bias: Value | None) -> Value | None:
    """Return `input @ weight.T + bias` for input [..., K] and weight [N, K] that are dequantised integers."""
    operands = _operands(b, input, weight)
    if operands is None or weight.rank != 2 or not 2 <= input.rank <= len(_BATCH_LETTERS) + 1:
        return None
    left, right = operands
    batch = _BATCH_LETTERS[: input.rank - 1]
    attributes: dict[str, Argument] = {
        # The seven terms after the operands: bias, then zero point and scale of both and of the result.
        "expr": f"{batch}k,nk,,,,,,,->{batch}n",
        "acc": "i32",
        "output": "i32",
        "bias": b.scalar(0, torch.int32),  # type: ignore[dict-item]  # a value until the graph is finished
        **_zero_points("a", left, "b", right),
    }
    shape = (*input.shape[:-1], weight.shape[0])
    total = b.emit(
        "tract_core_einsum_q", [(left.integers, right.integers)], shape=shape, dtype=torch.int32, attributes=attributes
    )
    return _scaled(b, total, left, right, bias, channel_axis=len(shape) - 1)


def integer_convolution(
    b: NnefBuilder,
    input: Value,
    weight: Value,
    bias: Value | None,
    shape: Sequence[Dim],
    attributes: Mapping[str, Argument],
) -> Value | None:
    """Return a convolution of dequantised integers; `attributes` are those of `conv`, paddings hold real zeros."""
    operands = _operands(b, input, weight)
    if operands is None:
        return None
    left, right = operands
    named = {
        **attributes,
        # tract 0.23.9, core/qconv.rs: a stands for the filter and b for the image.
        **_zero_points("b", left, "a", right),
        "output_dt": "i32",
    }
    inputs = [left.integers, right.integers, b.scalar(0, torch.int32)]
    total = b.emit("tract_core_qconv", inputs, shape=shape, dtype=torch.int32, attributes=named)
    return _scaled(b, total, left, right, bias, channel_axis=1)


def _operands(b: NnefBuilder, input: Value, weight: Value) -> tuple[QuantisedTensor, QuantisedTensor] | None:
    left, right = integers_of(b, input), integers_of(b, weight)
    if left is None or right is None or left.axis is not None or right.axis not in (None, 0):
        return None
    # A zero point per channel of the filter has no place in the operators; symmetric ones are all zero.
    if (
        right.integers.dtype is not torch.int8
        or not isinstance(left.zero_point, int)
        or right.zero_point not in (0, None)
    ):
        return None
    return left, right


def integers_of(b: NnefBuilder, value: Value) -> QuantisedTensor | None:
    """Return the integers that a value stands for, also where they were only moved after they were dequantised."""
    known = b.quantised.get(value.number)
    if known is not None:
        return known
    emission = b.maker_of(value)
    if emission is None or emission.operator not in _MOVING or not isinstance(emission.inputs[0], Value):
        return None
    source = integers_of(b, emission.inputs[0])
    if source is None or source.axis is not None:
        return None
    moved = b.emit(
        emission.operator,
        [source.integers, *emission.inputs[1:]],
        shape=value.shape,
        dtype=source.integers.dtype,
        attributes=dict(emission.attributes),
    )
    return replace(source, integers=moved)


def _zero_points(image: str, left: QuantisedTensor, filter: str, right: QuantisedTensor) -> dict[str, Argument]:
    """Name the zero points; the scales are applied to the sums afterwards, in f32 and as PyTorch rounds them."""
    zero_point = left.zero_point if isinstance(left.zero_point, int) else 0
    return {
        f"{image}0": zero_point,
        f"{image}_scale": 1.0,
        f"{filter}0": 0,
        f"{filter}_scale": 1.0,
        "c0": 0,
        "c_scale": 1.0,
    }


def _scaled(
    b: NnefBuilder, total: Value, left: QuantisedTensor, right: QuantisedTensor, bias: Value | None, channel_axis: int
) -> Value:
    """Return sums of integer products as floats: times both scales, plus the bias."""
    trailing = range(1, total.rank - channel_axis)
    scale: Value
    if isinstance(right.scale, Value):
        scale = b.binary("mul", right.scale, b.scalar(float(left.scale), torch.float32))  # type: ignore[arg-type]
        scale = b.unsqueeze(b.cast(scale, torch.float32), trailing)
    else:
        scale = b.scalar(float(left.scale) * float(right.scale), torch.float32)  # type: ignore[arg-type]
    result = b.binary("mul", b.cast(total, torch.float32), scale)
    if bias is None:
        return result
    return b.binary("add", result, b.unsqueeze(b.cast(bias, torch.float32), trailing))

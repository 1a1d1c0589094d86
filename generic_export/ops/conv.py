"""Convolutions, plain and transposed, in one to three dimensions. tract reads them as `conv` and `deconv` (NC*, OI*)."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral, TupleLiteral
from generic_export.ops.conv_taps import channel_by_channel, is_channel_by_channel
from generic_export.ops.integer_products import integer_convolution
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value, ints
from generic_export.translate.copies import copies_in_batch, picked_in_parts
from generic_export.translate.registry import translates

aten = torch.ops.aten

Pair = tuple[int, int]


def per_axis(values: Sequence[Dim] | Dim, count: int) -> list[int]:
    """Return one number per spatial axis; PyTorch lets a single one stand for all.

    Raises:
        TranslationError: a number depends on a dynamic size.
    """
    listed = list(values) if isinstance(values, Sequence) else [values]
    for value in listed:
        if not isinstance(value, int):
            raise TranslationError(f"{dim_text(value)}: strides, paddings and dilations must be static in tract.")
    return [int(value) for value in listed] * (count if len(listed) == 1 else 1)


def pairs(paddings: Sequence[Pair]) -> ArrayLiteral:
    """Return `[(before, after), ...]` as NNEF writes paddings."""
    return ArrayLiteral(tuple(TupleLiteral(pair) for pair in paddings))


def surrounded(b: NnefBuilder, source: Value, amounts: Sequence[Pair], **attributes: Argument) -> Value:
    """Add (before, after) places to each axis: zeros, unless the attributes name another border."""
    shape = [simplify_dim(sympy.sympify(size) + sum(pair)) for size, pair in zip(source.shape, amounts, strict=True)]
    named = {"padding": pairs(amounts), **attributes}
    return b.emit("pad", [b.materialised(source)], shape=shape, dtype=source.dtype, attributes=named)


def window_count(size: Dim, padding: Pair, kernel: int, dilation: int, stride: int) -> Dim:
    """Return how many windows fit in a padded axis, written as PyTorch writes it."""
    room = simplify_dim(sympy.sympify(size) + sum(padding) - dilation * (kernel - 1) - 1)
    return simplify_dim(sympy.sympify(floor_div(room, stride)) + 1)


def _static_kernel(weight: Value) -> list[int]:
    if not all(isinstance(dim, int) for dim in weight.shape):
        # docs/contributing/engine-facts.md#operators-of-tract_nnef: channels and kernel must be concrete, only
        # the batch and the image may be symbolic.
        raise TranslationError(
            f"convolution with a kernel of dynamic shape {[dim_text(d) for d in weight.shape]} is not supported."
        )
    return [int(dim) for dim in weight.shape]  # type: ignore[arg-type]


def _computing_dtype(b: NnefBuilder, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.float64  # tract's integer convolution is the quantised one: i64 fails in codegen
    wide = dtype is torch.float16 and b.numerics.f32_linear_accumulation
    return torch.float32 if wide else dtype


def _emit(
    b: NnefBuilder,
    operator: str,
    operands: Sequence[Value | None],
    shape: Sequence[Dim],
    attributes: dict[str, Argument],
) -> Value:
    """Emit `conv` or `deconv` in the element type that computes rightly."""
    present = [value for value in operands if value is not None]
    dtype = present[0].dtype
    computing = _computing_dtype(b, dtype)
    wide = [b.cast(value, computing) for value in present]
    return b.cast(b.emit(operator, wide, shape=shape, dtype=computing, attributes=attributes), dtype)


def window_attributes(
    padding: Sequence[Pair], stride: list[int], dilation: list[int], groups: int
) -> dict[str, Argument]:
    """Return the arguments of `conv` and `deconv`."""
    # docs/contributing/engine-facts.md#operators-of-tract_nnef: an empty padding means SAME_UPPER and any
    # border but 'constant' aborts: say everything.
    return {
        "border": "constant",
        "padding": pairs(padding),
        "stride": ints(stride),
        "dilation": ints(dilation),
        "groups": groups,
    }


@translates(
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
)
def conv(
    b: NnefBuilder,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sequence[Dim] | Dim = 1,
    padding: Sequence[Dim] | Dim | str = 0,
    dilation: Sequence[Dim] | Dim = 1,
    groups: int = 1,
) -> Value:
    """conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, ...) -> Tensor"""
    count = weight.rank - 2
    if input.rank == count + 1:
        batched = conv(b, b.unsqueeze(input, [0]), weight, bias, stride, padding, dilation, groups)
        return b.squeeze(batched, [0])
    if is_channel_by_channel(input, weight, groups):
        return _channel_by_channel(b, input, weight, bias, stride, padding, dilation)
    kernel = _static_kernel(weight)
    copies = copies_in_batch(b, input)
    if copies is not None:
        once = conv(b, copies.one, weight, bias, stride, padding, dilation, groups)
        return copies.again(b, once)
    if kernel[2:] == [1] * count:
        input = picked_in_parts(b, input)
    around = _around(weight, padding, dilation)
    strides, dilations = per_axis(stride, count), per_axis(dilation, count)
    spatial = [
        window_count(input.shape[2 + axis], around[axis], kernel[2 + axis], dilations[axis], strides[axis])
        for axis in range(count)
    ]
    shape = [input.shape[0], kernel[0], *spatial]
    attributes = window_attributes(around, strides, dilations, groups)
    in_integers = integer_convolution(b, input, weight, bias, shape, attributes)
    if in_integers is not None:
        return in_integers
    return _emit(b, "conv", [input, _settled_kernel(b, weight, groups), bias], shape, attributes)


def _channel_by_channel(
    b: NnefBuilder,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[Dim] | Dim,
    padding: Sequence[Dim] | Dim | str,
    dilation: Sequence[Dim] | Dim,
) -> Value:
    around = _around(weight, padding, dilation)
    strides, dilations = per_axis(stride, len(around)), per_axis(dilation, len(around))
    kernel = per_axis(weight.shape[2:], len(around))
    spatial = [
        window_count(input.shape[2 + axis], around[axis], kernel[axis], dilations[axis], strides[axis])
        for axis in range(len(around))
    ]
    padded = surrounded(b, input, [(0, 0), (0, 0), *around]) if any(map(any, around)) else input
    return channel_by_channel(b, padded, weight, bias, spatial, strides, dilations)


def _around(weight: Value, padding: Sequence[Dim] | Dim | str, dilation: Sequence[Dim] | Dim) -> list[Pair]:
    """Return the amounts before and after each axis; a name of PyTorch's is `valid` or `same`."""
    count = weight.rank - 2
    if not isinstance(padding, str):
        return [(pad, pad) for pad in per_axis(padding, count)]
    if padding != "same":
        return [(0, 0)] * count
    spans = zip(per_axis(weight.shape[2:], count), per_axis(dilation, count), strict=True)
    totals = [(size - 1) * step for size, step in spans]
    return [(total // 2, total - total // 2) for total in totals]


def _settled_kernel(b: NnefBuilder, weight: Value, groups: int) -> Value:
    """Return a depthwise kernel as something that tract reads in the shape it has.

    tract 0.23.9 takes an axis that was inserted into a constant kernel away again when it specialises a depthwise convolution
    of static size, and computes with the wrong strides (docs/contributing/engine-facts.md#depthwise-convolutions). A maximum with
    itself stands in between.
    """
    computed = b.label_of(weight) is None and weight.dtype in (torch.float16, torch.float32)
    depthwise = groups > 1 and weight.shape[0] == groups and weight.shape[1] == 1
    return b.binary("max", weight, weight) if computed and depthwise else weight


@translates(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    b: NnefBuilder,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sequence[Dim] | Dim = 1,
    padding: Sequence[Dim] | Dim = 0,
    output_padding: Sequence[Dim] | Dim = 0,
    groups: int = 1,
    dilation: Sequence[Dim] | Dim = 1,
) -> Value:
    """conv_transpose2d.input(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, ...) -> Tensor"""
    kernel = _static_kernel(weight)
    count = len(kernel) - 2
    if input.rank == count + 1:
        unbatched = b.unsqueeze(input, [0])
        batched = conv_transpose(b, unbatched, weight, bias, stride, padding, output_padding, groups, dilation)
        return b.squeeze(batched, [0])
    strides, dilations = per_axis(stride, count), per_axis(dilation, count)
    paddings, added = per_axis(padding, count), per_axis(output_padding, count)
    # tract takes the size of the result only for concrete images (deser.rs conv_like); cropping less at the end is the
    # same, and what no crop is left for holds nothing but the bias.
    cropped = [(pad, max(pad - extra, 0)) for pad, extra in zip(paddings, added, strict=True)]
    missing = [max(extra - pad, 0) for pad, extra in zip(paddings, added, strict=True)]
    spatial = [
        simplify_dim(
            (sympy.sympify(input.shape[2 + axis]) - 1) * strides[axis]
            + dilations[axis] * (kernel[2 + axis] - 1)
            + 1
            - sum(cropped[axis])
        )
        for axis in range(count)
    ]
    late_bias = bias if any(missing) else None
    operands = [input, _output_first(b, weight, groups), None if late_bias is not None else bias]
    shape = [input.shape[0], kernel[1] * groups, *spatial]
    result = _emit(b, "deconv", operands, shape, window_attributes(cropped, strides, dilations, groups))
    if not any(missing):
        return result
    padded = surrounded(b, result, [(0, 0), (0, 0), *((0, m) for m in missing)])
    if late_bias is None:
        return padded
    return b.binary("add", padded, b.unsqueeze(b.cast(late_bias, padded.dtype), range(1, count + 1)))


def _output_first(b: NnefBuilder, weight: Value, groups: int) -> Value:
    """[in, out/groups, k...] as PyTorch stores it -> [out, in/groups, k...] as tract's `deconv` reads it."""
    inputs, outputs, *spatial = _static_kernel(weight)
    if groups == 1:
        return b.transpose(weight, [1, 0, *range(2, weight.rank)])
    split = b.reshape(weight, [groups, inputs // groups, outputs, *spatial])
    swapped = b.transpose(split, [0, 2, 1, *range(3, split.rank)])
    return b.reshape(swapped, [groups * outputs, inputs // groups, *spatial])


@translates(aten.convolution.default)
def convolution(
    b: NnefBuilder,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[Dim],
    padding: Sequence[Dim],
    dilation: Sequence[Dim],
    transposed: bool,
    output_padding: Sequence[Dim],
    groups: int,
) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, ..., SymInt groups) -> Tensor"""
    if transposed:
        return conv_transpose(b, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(b, input, weight, bias, stride, padding, dilation, groups)


@rewrites(aten.conv_tbc.default)
def conv_tbc(self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """A convolution over the first axis of [T, B, C]; the kernel is [K, C, O]."""
    result = torch.nn.functional.conv1d(self.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return result.permute(2, 0, 1)

"""Convolutions, plain and transposed, in one to three dimensions. tract reads them as `conv` and `deconv` (NC*, OI*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral, TupleLiteral
from generic_export.ops.integer_products import integer_convolution
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, same_dim, same_shape, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value, ints
from generic_export.translate.registry import translates
from generic_export.translate.value import values_in

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
            raise TranslationError(
                f"{dim_text(value)}: strides, paddings and dilations must be plain numbers in tract."
            )
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
        raise TranslationError(f"convolution with a kernel of dynamic shape {[dim_text(d) for d in weight.shape]}.")
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


# A convolution of each channel by itself, as a sum over the places of its kernel: for a number of channels that is not
# known.
# tract's `conv` wants concrete channels; the batch of what torchaudio's deltas and convolutions read has become
# channels.
def is_channel_by_channel(input: Value, weight: Value, groups: Dim) -> bool:
    """Say whether a convolution has dynamic channels, each with a kernel of its own whose size is known."""
    channels, per_group, *kernel = weight.shape
    if isinstance(channels, int) or not all(isinstance(size, int) for size in (per_group, *kernel)):
        return False
    return same_dim(groups, channels) and same_dim(input.shape[1], channels)


def channel_by_channel(
    b: NnefBuilder,
    padded: Value,
    weight: Value,
    bias: Value | None,
    spatial: Sequence[Dim],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    """Return the convolution.

    Args:
        b: writes it.
        padded: [N, C, ...] with its borders.
        weight: [C, 1, kernel ...].
        bias: [C] or None.
        spatial: sizes of the result after [N, C].
        stride, dilation: by spatial axis.
    """
    total: Value | None = None
    for place in product(*(range(int(size)) for size in weight.shape[2:])):  # type: ignore[arg-type]
        seen, factor = padded, weight
        for axis, at in enumerate(place):
            first, last = at * dilation[axis], sympy.sympify(spatial[axis]) - 1
            end = simplify_dim(first + stride[axis] * last + 1)
            seen = b.slice(seen, 2 + axis, first, end, stride[axis])
            factor = b.slice(factor, 2 + axis, at, at + 1)
        term = b.binary("mul", seen, b.unsqueeze(b.squeeze(factor, [1]), [0]))
        total = term if total is None else b.binary("add", total, term)
    assert total is not None  # a kernel has a place
    if bias is None:
        return total
    return b.binary("add", total, b.unsqueeze(bias, [0, *range(2, total.rank)]))


# A batch some of whose rows are copies of each other: computed once, and copied after.
# tract (core/src/ops/einsum/mod.rs) makes a product of a convolution with a kernel of 1, folds the reshape that joined
# pictures and queries into it, takes the repetition off, and cannot put the result in its place: "Trying to substitute
# a B,8,16,56,56 by B,1,16,56,56" (DETR's maps, one copy for each query). It is less work too.
@dataclass(frozen=True)
class Copies:
    """A batch of copies.

    Attributes:
        one: the batch without them.
        lead: the axes that its first axis was made of, 1 where there were copies.
        repeated: the same with the copies.
        size: of the first axis with the copies.
    """

    one: Value
    lead: tuple[Dim, ...]
    repeated: tuple[Dim, ...]
    size: Dim

    def again(self, b: NnefBuilder, computed: Value) -> Value:
        """Return what was computed of `one` as often as there are copies."""
        rest = computed.shape[1:]
        apart = b.reshape(computed, [*self.lead, *rest])
        return b.reshape(b.broadcast(apart, [*self.repeated, *rest]), [self.size, *rest])


def copies_in_batch(b: NnefBuilder, value: Value) -> Copies | None:
    """Return what a value's first axis holds copies of; None unless it was made of an axis that is sure to be a repetition."""
    found = _repetition(b, value)
    if found is None:
        return None
    source, axes = found
    single = source
    for axis in axes:
        single = b.slice(single, axis, 0, 1)
    joined = source.rank - value.rank + 1
    lead, repeated = single.shape[:joined], source.shape[:joined]
    size = simplify_dim(sympy.Mul(*map(sympy.sympify, lead)))
    return Copies(b.reshape(single, [size, *value.shape[1:]]), tuple(lead), tuple(repeated), value.shape[0])


def picked_in_parts(b: NnefBuilder, value: Value) -> Value:
    """Return a concatenation whose parts with copies are gathered: tract takes a product over it apart, part by part."""
    maker = b.maker_of(value)
    if maker is None or maker.operator != "concat":
        return value
    parts = list(values_in(maker.inputs))
    repetitions = [_repetition(b, part) for part in parts]
    if not any(repetitions):
        return value
    gathered = [
        part if found is None else b.reshape(b.picked(*found), part.shape)
        for part, found in zip(parts, repetitions, strict=True)
    ]
    return b.concat(gathered, int(dict(maker.attributes)["axis"]))  # type: ignore[arg-type]


def _repetition(b: NnefBuilder, value: Value) -> tuple[Value, list[int]] | None:
    """Return what a value is a reshape of, and the axes with copies that went into its first one."""
    maker = b.maker_of(value)
    if maker is None or maker.operator != "reshape":
        return None
    (source,) = values_in(maker.inputs)
    joined = source.rank - value.rank + 1
    if joined < 2 or not same_shape(source.shape[joined:], value.shape[1:]):
        return None
    axes = [axis for axis in range(joined) if b.holds_copies(source, axis)]
    return (source, axes) if axes else None

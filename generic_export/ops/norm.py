"""Normalizations, computed in f32 as by tract's own RMS norm (docs/contributing/engine-facts.md#operators-of-tract_core)."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.nnef.graph import Argument
from generic_export.ops.reduction import widened
from generic_export.ops.shape import volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten


# --- layer and RMS norms: over the last axes -------------------------------------------------------


@translates(aten.rms_norm.default)
def rms_norm(
    b: NnefBuilder, input: Value, normalized_shape: Sequence[Dim], weight: Value | None = None, eps: float | None = None
) -> Value:
    """rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor"""
    epsilon = torch.finfo(input.dtype).eps if eps is None else eps
    source = b.cast(input, torch.float32) if b.numerics.f32_norm else input
    normed = _over_last_axes(b, source, len(normalized_shape), epsilon)
    return b.cast(_affine(b, normed, weight, None), input.dtype)


@translates(aten.layer_norm.default)
def layer_norm(
    b: NnefBuilder,
    input: Value,
    normalized_shape: Sequence[Dim],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-05,
) -> Value:
    """layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, ...)"""
    axes = _last_axes(input, len(normalized_shape))
    wide = widened(b, input)
    centred = b.binary("sub", wide, b.reduce("mean_reduce", wide, axes, keepdim=True))
    normed = _over_last_axes(b, centred, len(axes), eps)
    affine = normed if b.numerics.f32_norm else b.cast(normed, input.dtype)
    return b.cast(_affine(b, affine, weight, bias), input.dtype)


@translates(aten.native_layer_norm.default)
def native_layer_norm(
    b: NnefBuilder,
    input: Value,
    normalized_shape: Sequence[Dim],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, ...) -> (Tensor, Tensor, Tensor)"""
    mean, inverse = _statistics(b, widened(b, input), _last_axes(input, len(normalized_shape)), eps)
    normed = layer_norm(b, input, normalized_shape, weight, bias, eps)
    return normed, b.cast(mean, input.dtype), b.cast(inverse, input.dtype)


def _last_axes(value: Value, count: int) -> list[int]:
    return list(range(value.rank - count, value.rank))


def _affine(b: NnefBuilder, value: Value, weight: Value | None, bias: Value | None) -> Value:
    if weight is not None:
        value = b.binary("mul", value, b.cast(weight, value.dtype))
    if bias is not None:
        value = b.binary("add", value, b.cast(bias, value.dtype))
    return value


def _over_last_axes(b: NnefBuilder, value: Value, count: int, epsilon: float) -> Value:
    """value / sqrt(mean(value^2) + epsilon); several axes are folded into one, over which tract normalises."""
    outer = value.shape[: value.rank - count]
    flat = value if count == 1 else b.reshape(value, [*outer, volume(value.shape[value.rank - count :])])
    return b.reshape(_root_mean_square(b, flat, epsilon), value.shape)


def _root_mean_square(b: NnefBuilder, value: Value, epsilon: float) -> Value:
    """value / sqrt(mean(value^2) + epsilon) over the last axis."""
    if value.dtype is torch.float64:
        # tract's RMS norm computes in f32 whatever its input.
        mean = b.reduce("mean_reduce", b.unary("square", value), [value.rank - 1], keepdim=True)
        return b.binary("mul", value, b.unary("rsqrt", b.binary("add", mean, b.scalar(epsilon, value.dtype))))
    attributes: dict[str, Argument] = {"axis": value.rank - 1, "eps": float(epsilon)}
    return b.emit("tract_core_rms_norm", [value], shape=value.shape, dtype=value.dtype, attributes=attributes)


def _statistics(b: NnefBuilder, value: Value, axes: Sequence[int], epsilon: float) -> tuple[Value, Value]:
    """Return the mean and 1 / sqrt(variance + epsilon) over some axes, which stay with size 1."""
    mean, variance = _moments(b, value, axes)
    return mean, _inverse_deviation(b, variance, epsilon)


def _moments(b: NnefBuilder, value: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    mean = b.reduce("mean_reduce", value, axes, keepdim=True)
    centred = b.binary("sub", value, mean)
    return mean, b.reduce("mean_reduce", b.unary("square", centred), axes, keepdim=True)


def _inverse_deviation(b: NnefBuilder, variance: Value, epsilon: float) -> Value:
    return b.unary("rsqrt", b.binary("add", variance, b.scalar(float(epsilon), variance.dtype)))


# --- group norm: over groups of channels -----------------------------------------------------------


@translates(aten.group_norm.default)
def group_norm(
    b: NnefBuilder,
    input: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> Value:
    """group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, ...) -> Tensor"""
    del cudnn_enabled
    wide = widened(b, input)
    grouped, axes = _groups(b, wide, num_groups)
    if len(axes) == 1:
        centred = b.binary("sub", grouped, b.reduce("mean_reduce", grouped, axes, keepdim=True))
        normed = _root_mean_square(b, centred, eps)
    else:
        normed = _standardised(b, grouped, *_statistics(b, grouped, axes, eps))
    return b.cast(_affine_channels(b, b.reshape(normed, input.shape), weight, bias), input.dtype)


def _groups(b: NnefBuilder, value: Value, num_groups: int) -> tuple[Value, list[int]]:
    """Return [N, groups, rest], and the axes of a group: one, or those of dynamic pictures as they are.

    A size that is a product of a height and a width keeps tract's load for minutes.
    """
    channels = sympy.sympify(value.shape[1])
    volume_of_one = sympy.sympify(volume(value.shape[2:]))
    apart = len(volume_of_one.free_symbols) > 1
    rest = (
        [simplify_dim(channels / num_groups), *value.shape[2:]]
        if apart
        else [simplify_dim(channels * volume_of_one / num_groups)]
    )
    grouped = b.reshape(value, [value.shape[0], num_groups, *rest])
    return grouped, list(range(2, grouped.rank))


def _standardised(b: NnefBuilder, value: Value, mean: Value, inverse: Value) -> Value:
    return b.binary("mul", b.binary("sub", value, mean), inverse)


@translates(aten.native_group_norm.default)
def native_group_norm(
    b: NnefBuilder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    N: Dim,  # noqa: N803
    C: Dim,  # noqa: N803
    HxW: Dim,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, ...)"""
    del N, C, HxW  # the input's own
    grouped, axes = _groups(b, widened(b, input), group)
    mean, inverse = _statistics(b, grouped, axes, eps)
    normed = b.reshape(_standardised(b, grouped, mean, inverse), input.shape)
    affine = _affine_channels(b, normed, weight, bias)
    mean, inverse = b.squeeze(mean, axes), b.squeeze(inverse, axes)
    return b.cast(affine, input.dtype), b.cast(mean, input.dtype), b.cast(inverse, input.dtype)


def _affine_channels(b: NnefBuilder, value: Value, weight: Value | None, bias: Value | None) -> Value:
    """Apply parameters per channel: trailing axes of size 1 make them meet axis 1 of the value."""
    shaped = [None if each is None else b.unsqueeze(each, range(1, value.rank - 1)) for each in (weight, bias)]
    return _affine(b, value, *shaped)


# --- batch and instance norms: per channel ---------------------------------------------------------


@translates(aten.instance_norm.default)
def instance_norm(
    b: NnefBuilder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    """instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, ...)"""
    del momentum, cudnn_enabled
    if not use_input_stats and running_mean is not None and running_var is not None:
        return _running_norm(b, input, weight, bias, running_mean, running_var, eps)
    wide = widened(b, input)
    mean, inverse = _statistics(b, wide, list(range(2, input.rank)), eps)
    normed = _standardised(b, wide, mean, inverse)
    return b.cast(_affine_channels(b, normed, weight, bias), input.dtype)


def _running_norm(
    b: NnefBuilder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    epsilon: float,
) -> Value:
    """Normalise with stored statistics: one multiplication and one addition, whose constants tract folds at load."""
    mean, variance = widened(b, running_mean), widened(b, running_var)
    scale = _affine(b, _inverse_deviation(b, variance, epsilon), weight, None)
    shift = _affine(b, b.unary("neg", b.binary("mul", mean, scale)), None, bias)
    return b.cast(_affine_channels(b, b.cast(input, scale.dtype), scale, shift), input.dtype)


def _saved_statistics(
    b: NnefBuilder, input: Value, running_mean: Value, running_var: Value, epsilon: float
) -> list[Value]:
    """Return what is saved for a backward pass: nothing on a CPU, mean and inverse deviation where only shapes are known."""
    if b.result_shapes[1:2] in ((), ((0,),)):
        return [b.full((0,), 0, input.dtype)] * 2
    return [running_mean, _inverse_deviation(b, running_var, epsilon)]


def _batch_statistics_norm(
    b: NnefBuilder, input: Value, weight: Value | None, bias: Value | None, epsilon: float
) -> tuple[Value, Value, Value]:
    """Normalise with the statistics of the batch itself; return them too: mean and biased variance per channel."""
    wide = widened(b, input)
    mean, variance = _moments(b, wide, [axis for axis in range(input.rank) if axis != 1])
    normed = _standardised(b, wide, mean, _inverse_deviation(b, variance, epsilon))
    affine = _affine_channels(b, normed, weight, bias)
    channels = [input.shape[1]]
    return b.cast(affine, input.dtype), b.reshape(mean, channels), b.reshape(variance, channels)


def _updated(b: NnefBuilder, input: Value, running: Value, batch: Value, momentum: float, *, unbiased: bool) -> Value:
    """Return momentum * batch + (1 - momentum) * running, with the variance that divides by n - 1."""
    if unbiased:
        count = volume([dim for axis, dim in enumerate(input.shape) if axis != 1])
        total = b.scalar(sympy.sympify(count), batch.dtype)
        rest = b.scalar(simplify_dim(sympy.sympify(count) - 1), batch.dtype)
        batch = b.binary("mul", batch, b.binary("div", total, rest))
    kept = b.binary("mul", running, b.scalar(1.0 - momentum, running.dtype))
    return b.binary("add", kept, b.binary("mul", b.cast(batch, running.dtype), b.scalar(momentum, running.dtype)))


@variant(aten.batch_norm.default, results=1)
@variant(aten.native_batch_norm.default, cudnn_enabled=False, results=3)
@variant(aten._native_batch_norm_legit.no_stats, running_mean=None, running_var=None, cudnn_enabled=False, results=3)
@variant(aten._native_batch_norm_legit_no_training.default, training=False, cudnn_enabled=False, results=3)
@variant(aten._native_batch_norm_legit_functional.default, cudnn_enabled=False, results=5)
def batch_norm(
    b: NnefBuilder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    results: int,
) -> list[Value]:
    """native_batch_norm(Tensor input, Tensor? weight, ..., bool training, ...) -> (Tensor, Tensor, Tensor)

    The results are the normalised input, the saved mean and inverse deviation, then the running statistics after the call.
    """
    del cudnn_enabled
    if not training and running_mean is not None and running_var is not None:
        normed = _running_norm(b, input, weight, bias, running_mean, running_var, eps)
        saved = [] if results == 1 else _saved_statistics(b, input, running_mean, running_var, eps)
        return [normed, *saved, running_mean, running_var][:results]
    normed, mean, variance = _batch_statistics_norm(b, input, weight, bias, eps)
    if results == 1:
        return [normed]
    made = [normed, mean, _inverse_deviation(b, variance, eps)]
    if running_mean is not None and running_var is not None:
        made.append(_updated(b, input, running_mean, mean, momentum, unbiased=False))
        made.append(_updated(b, input, running_var, variance, momentum, unbiased=True))
    return made[:results]


@translates(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    b: NnefBuilder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> list[Value]:
    """_batch_norm_with_update_functional(...) -> (Tensor, Tensor, Tensor, Tensor reserve, Tensor, Tensor)"""
    made = batch_norm(b, input, weight, bias, running_mean, running_var, True, momentum, eps, False, results=5)
    reserve = b.full((0,), 0, torch.uint8)  # what a GPU library keeps for its backward pass: empty on CPU
    return [*made[:3], reserve, *made[3:]]

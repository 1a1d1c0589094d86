"""Normalisations. tract's own RMS norm computes in f32 whatever its input (facts/tract.md §3.2); the others do here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from generic_export.errors import TranslationError
from generic_export.ops.builder import NnefBuilder, Value
from generic_export.ops.registry import translates
from generic_export.torch_graph.dims import Dim

aten = torch.ops.aten


@translates(aten.rms_norm.default)
def rms_norm(
    b: NnefBuilder, input: Value, normalized_shape: Sequence[Dim], weight: Value | None = None, eps: float | None = None
) -> Value:
    """rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor"""
    if len(normalized_shape) != 1:
        raise TranslationError(f"rms_norm over {len(normalized_shape)} axes: tract normalises over one.")
    epsilon = torch.finfo(input.dtype).eps if eps is None else eps
    source = b.cast(input, torch.float32) if b.numerics.f32_norm else input
    normed = _root_mean_square(b, source, epsilon)
    if weight is not None:
        normed = b.binary("mul", normed, b.cast(weight, normed.dtype))
    return b.cast(normed, input.dtype)


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
    if len(normalized_shape) != 1:
        raise TranslationError(f"layer_norm over {len(normalized_shape)} axes has no translation yet.")
    # The mean of f16 values is taken in f32: a sum of a thousand of them leaves f16's range or its precision.
    wide = b.cast(input, torch.float32)
    centred = b.binary("sub", wide, b.reduce("mean_reduce", wide, [input.rank - 1], keepdim=True))
    normed = _root_mean_square(b, centred, eps)
    affine = normed if b.numerics.f32_norm else b.cast(normed, input.dtype)
    if weight is not None:
        affine = b.binary("mul", affine, b.cast(weight, affine.dtype))
    if bias is not None:
        affine = b.binary("add", affine, b.cast(bias, affine.dtype))
    return b.cast(affine, input.dtype)


def _root_mean_square(b: NnefBuilder, value: Value, epsilon: float) -> Value:
    """value / sqrt(mean(value^2) + epsilon) over the last axis."""
    attributes = {"axis": value.rank - 1, "eps": float(epsilon)}
    return b.emit("tract_core_rms_norm", [value], shape=value.shape, dtype=value.dtype, attributes=attributes)

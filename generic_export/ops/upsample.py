"""Resampling of images: interpolation in every mode, sampling at the points of a grid.

tract's `resize` serves known sizes and whole scale factors; at other dynamic sizes, and for releases without it, each axis is
interpolated with gathers, and nearest upsampling by whole factors repeats positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral, DimLiteral, TupleLiteral
from generic_export.ops.indexing import gather, positions, written_out
from generic_export.ops.reduction import sum_of, widened
from generic_export.ops.variants import variant
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value, ints

aten = torch.ops.aten

_MAX_SCALE_DENOMINATOR = 4096
_MAX_WRITTEN_WEIGHTS = 512 * 512
_CUBIC_A = -0.75  # PyTorch's (and tract's) coefficient of the cubic kernel
_SMOOTH_CUBIC_A = -0.5  # PyTorch's for antialiased interpolation


@dataclass(frozen=True)
class Resampling:
    """How positions of the result map to positions of the source.

    Attributes:
        interpolator: nearest, linear or cubic.
        align_corners: the first and last positions of both fall together.
        centred: positions are the centres of their cells (everything but PyTorch's plain `nearest`).
    """

    interpolator: str
    align_corners: bool = False
    centred: bool = True

    def coordinates(self) -> str:
        """Return tract's name of the mapping (docs/contributing/engine-facts.md#equivalents-of-pytorch-operators)."""
        if self.align_corners:
            return "align_corners"
        return "half_pixel" if self.centred else "asymmetric"

    def rounding(self) -> str:
        """Return tract's name of the way nearest positions are rounded."""
        return "round_prefer_ceil" if self.interpolator == "nearest" and self.centred else "floor"


_NEAREST = Resampling("nearest", centred=False)


def scaled_size(size: Dim, scale: float) -> Dim:
    """Return floor(size * scale), as PyTorch computes the size of the result."""
    if isinstance(size, int):
        return math.floor(size * scale)
    ratio = Fraction(scale).limit_denominator(_MAX_SCALE_DENOMINATOR)
    return floor_div(simplify_dim(size * ratio.numerator), ratio.denominator)


def _whole_scale(size: Dim, result: Dim) -> int | None:
    """Return how many times larger the result is, when that is a whole number at any size."""
    ratio = sympy.cancel(sympy.sympify(result) / sympy.sympify(size)) if not same_dim(size, 0) else None
    return int(ratio) if ratio is not None and ratio.is_Integer and ratio > 0 else None


def resampled(
    b: NnefBuilder, value: Value, sizes: Sequence[Dim], scales: Sequence[float | None], how: Resampling
) -> Value:
    """Resample the last axes to `sizes`; `scales` are the factors PyTorch was given, if it was."""
    first = value.rank - len(sizes)
    image = value.shape[first:]
    if all(same_dim(have, want) for have, want in zip(image, sizes, strict=True)) and all(
        scale in (None, 1.0) for scale in scales
    ):
        return value
    factors = _repetitions(image, sizes, scales) if how.interpolator == "nearest" else None
    if factors is not None and b.spelling.debox_upsampling and value.dtype.is_floating_point:
        return _debox(b, value, sizes, factors)
    if factors is not None and not b.spelling.resize_operator:
        return _repeated(b, value, sizes, factors)
    native = _native_argument(image, sizes, scales, how) if b.spelling.resize_operator else None
    if native is not None and (native[0] == "scales" or all(isinstance(dim, int) for dim in value.shape[:first])):
        return _resize(b, value, sizes, native, how)
    computing = torch.float64 if value.dtype is torch.float64 else torch.float32
    result = b.cast(value, computing) if how.interpolator != "nearest" else value
    for offset, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        result = _resampled_axis(b, result, first + offset, size, scale, how)
    return b.cast(result, value.dtype)


def _repetitions(image: Sequence[Dim], sizes: Sequence[Dim], scales: Sequence[float | None]) -> list[int] | None:
    """Return how often nearest upsampling repeats each position, when that is a whole number of times everywhere."""
    whole = [_whole_scale(have, want) for have, want in zip(image, sizes, strict=True)]
    if any(scale not in (None, factor) for scale, factor in zip(scales, whole, strict=True)):
        return None  # a scale of 2.5 makes 5 of 2, but not by repeating
    return [factor for factor in whole if factor is not None] if None not in whole else None


def _debox(b: NnefBuilder, value: Value, sizes: Sequence[Dim], factors: Sequence[int]) -> Value:
    """Repeat each position: NNEF's `debox` with boxes that touch and do not overlap."""
    outer = value.rank - len(sizes)
    box = ints([*(1 for _ in range(outer)), *factors])
    attributes: dict[str, Argument] = {
        "size": box,
        "stride": box,
        "padding": ArrayLiteral(tuple(TupleLiteral((0, 0)) for _ in range(value.rank))),
        "dilation": ints([1] * value.rank),
        "border": "constant",
    }
    shape = [*value.shape[:outer], *sizes]
    return b.emit("debox", [value], shape=shape, dtype=value.dtype, attributes=attributes)


def _repeated(b: NnefBuilder, value: Value, sizes: Sequence[Dim], factors: Sequence[int]) -> Value:
    """Repeat each position: an axis of the factor behind each axis of the image, then both as one."""
    first = value.rank - len(sizes)
    apart = b.unsqueeze(value, [first + 2 * index + 1 for index in range(len(sizes))])
    full = [dim for pair in zip(value.shape[first:], factors, strict=True) for dim in pair]
    return b.reshape(b.broadcast(apart, [*value.shape[:first], *full]), [*value.shape[:first], *sizes])


def _native_argument(
    image: Sequence[Dim], sizes: Sequence[Dim], scales: Sequence[float | None], how: Resampling
) -> tuple[str, list[float]] | None:
    """Return the argument that makes tract's `resize` map positions as PyTorch does, or None."""
    whole = [_whole_scale(have, want) for have, want in zip(image, sizes, strict=True)]
    given = [
        scale if scale is not None and not how.align_corners else factor
        for scale, factor in zip(scales, whole, strict=True)
    ]
    if all(factor is not None and scale == factor for factor, scale in zip(whole, given, strict=True)):
        return "scales", [float(factor) for factor in whole]  # type: ignore[arg-type]
    if not all(isinstance(dim, int) for dim in (*image, *sizes)):
        return None  # Resize needs its sizes as constants: "Undetermined symbol" at run otherwise
    if how.interpolator == "nearest":
        return None  # a position that falls on the edge of a cell must be rounded as PyTorch rounds it
    if how.align_corners or all(scale is None for scale in scales):
        return "sizes", [float(size) for size in sizes]  # type: ignore[arg-type]
    factors = [scale if scale is not None else float(Fraction(int(want), int(have))) for scale, have, want in
               zip(scales, image, sizes, strict=True)]  # type: ignore[arg-type]  # fmt: skip
    # tract computes the size in f32: `(size * scale) as usize`.
    lengths = [int(np.float32(have) * np.float32(factor)) for have, factor in zip(image, factors, strict=True)]  # type: ignore[arg-type]
    return ("scales", factors) if lengths == list(sizes) else None


def _resize(
    b: NnefBuilder, value: Value, sizes: Sequence[Dim], native: tuple[str, list[float]], how: Resampling
) -> Value:
    name, numbers = native
    outer = value.shape[: value.rank - len(sizes)]
    argument: Argument
    if name == "scales":
        argument = ArrayLiteral((*(1.0 for _ in outer), *numbers))
    else:
        argument = ints([*(int(dim) for dim in outer), *(int(number) for number in numbers)])  # type: ignore[arg-type]
    attributes: dict[str, Argument] = {
        name: argument,
        "coord_transformer": how.coordinates(),
        "interpolator": how.interpolator,
        "nearest_mode": how.rounding(),
    }
    shape = [*outer, *sizes]
    return b.emit("tract_core_resize", [value], shape=shape, dtype=value.dtype, attributes=attributes)


# --- one axis at a time, at sizes that the engine learns at run time -------------------------------


def _resampled_axis(b: NnefBuilder, value: Value, axis: int, size: Dim, scale: float | None, how: Resampling) -> Value:
    length = value.shape[axis]
    if same_dim(length, size) and scale in (None, 1.0):
        return value
    position = _source_positions(b, length, size, scale, how)
    if how.interpolator == "nearest":
        return gather(b, value, _clamped(b, b.unary("floor", position), length), axis)
    if how.interpolator == "linear" and not how.align_corners:
        position = b.binary("max", position, b.scalar(0.0, torch.float32))
    cell = b.unary("floor", position)
    inside = b.binary("sub", position, cell)
    taps = _linear_taps(b, inside) if how.interpolator == "linear" else _cubic_taps(b, inside)
    total: Value | None = None
    for offset, weight in taps:
        neighbour = b.binary("add", cell, b.scalar(float(offset), torch.float32)) if offset else cell
        picked = gather(b, value, _clamped(b, neighbour, length), axis)
        shaped = b.unsqueeze(b.cast(weight, value.dtype), range(1, value.rank - axis))
        term = b.binary("mul", picked, shaped)
        total = term if total is None else b.binary("add", total, term)
    assert total is not None
    return total


def _source_positions(b: NnefBuilder, length: Dim, size: Dim, scale: float | None, how: Resampling) -> Value:
    """Return, for each position of the result, where it lies in the source, in f32 like PyTorch."""
    f32 = torch.float32
    index = b.cast(b.emit("tract_core_range", [0, DimLiteral(dim_text(size)), 1], shape=[size], dtype=torch.int64), f32)
    if how.align_corners:
        gaps = b.binary("max", b.scalar(sympy.sympify(size) - 1, f32), b.scalar(1.0, f32))
        ratio = b.binary("div", b.scalar(sympy.sympify(length) - 1, f32), gaps)
        # One single position lies at the start; the clamp of the gaps alone would leave it there too: 0 * ratio.
        return b.binary("mul", index, ratio)
    ratio = _step(b, length, size, scale)
    if not how.centred:
        return b.binary("mul", index, ratio)
    centre = b.binary("mul", b.binary("add", index, b.scalar(0.5, f32)), ratio)
    return centre if how.interpolator == "nearest" else b.binary("sub", centre, b.scalar(0.5, f32))


def _step(b: NnefBuilder, length: Dim, size: Dim, scale: float | None) -> Value:
    """Return how many positions of the source one of the result is, in f32."""
    if scale is not None:
        return b.scalar(float(np.float32(1.0 / scale)), torch.float32)
    return b.binary("div", *(b.scalar(sympy.sympify(each), torch.float32) for each in (length, size)))


def _clamped(b: NnefBuilder, position: Value, length: Dim) -> Value:
    """Return whole positions as indices inside the axis; others abort.

    See docs/contributing/engine-facts.md#what-aborts-the-process.
    """
    low = b.binary("max", position, b.scalar(0.0, torch.float32))
    last = b.scalar(sympy.sympify(length) - 1, torch.float32)
    return b.cast(b.binary("min", low, last), torch.int64)


def _linear_taps(b: NnefBuilder, inside: Value) -> list[tuple[int, Value]]:
    return [(0, b.binary("sub", b.scalar(1.0, inside.dtype), inside)), (1, inside)]


def _cubic_taps(b: NnefBuilder, inside: Value) -> list[tuple[int, Value]]:
    """Return the four weights of the cubic convolution kernel   (Keys 1981, eq. 4, a = -0.75)"""
    rest = b.binary("sub", b.scalar(1.0, inside.dtype), inside)
    return [
        (-1, _cubic_outer(b, b.binary("add", inside, b.scalar(1.0, inside.dtype)))),
        (0, _cubic_inner(b, inside)),
        (1, _cubic_inner(b, rest)),
        (2, _cubic_outer(b, b.binary("add", rest, b.scalar(1.0, inside.dtype)))),
    ]


def _cubic_inner(b: NnefBuilder, t: Value) -> Value:
    return _polynomial(b, t, [_CUBIC_A + 2, -(_CUBIC_A + 3), 0.0, 1.0])


def _cubic_outer(b: NnefBuilder, t: Value) -> Value:
    return _polynomial(b, t, [_CUBIC_A, -5 * _CUBIC_A, 8 * _CUBIC_A, -4 * _CUBIC_A])


def _polynomial(b: NnefBuilder, t: Value, coefficients: Sequence[float]) -> Value:
    total = b.binary("mul", t, b.scalar(coefficients[0], t.dtype))
    for position, coefficient in enumerate(coefficients[1:], start=1):
        total = b.binary("add", total, b.scalar(coefficient, t.dtype)) if coefficient else total
        total = b.binary("mul", total, t) if position < len(coefficients) - 1 else total
    return total


# --- PyTorch's operators -----------------------------------------------------------------------------


def _sizes_and_scales(
    value: Value, output_size: Sequence[Dim] | None, scale_factors: Sequence[float] | None
) -> tuple[list[Dim], list[float | None]]:
    """Return the sizes of the result and the factors they were given as, for each axis behind batch and channels."""
    image = value.shape[2:]
    if output_size is not None:
        return list(output_size), [None] * len(image)
    if scale_factors is None:
        raise TranslationError("interpolation with neither a size nor a scale factor.")
    sizes = [scaled_size(size, float(scale)) for size, scale in zip(image, scale_factors, strict=True)]
    return sizes, [float(scale) for scale in scale_factors]


@variant(aten.upsample_nearest1d.vec, how=_NEAREST, align_corners=False)
@variant(aten.upsample_nearest2d.vec, how=_NEAREST, align_corners=False)
@variant(aten.upsample_nearest3d.vec, how=_NEAREST, align_corners=False)
@variant(aten._upsample_nearest_exact1d.vec, how=Resampling("nearest"), align_corners=False)
@variant(aten._upsample_nearest_exact2d.vec, how=Resampling("nearest"), align_corners=False)
@variant(aten._upsample_nearest_exact3d.vec, how=Resampling("nearest"), align_corners=False)
@variant(aten.upsample_linear1d.vec, how=Resampling("linear"))
@variant(aten.upsample_bilinear2d.vec, how=Resampling("linear"))
@variant(aten.upsample_trilinear3d.vec, how=Resampling("linear"))
@variant(aten.upsample_bicubic2d.vec, how=Resampling("cubic"))
def upsample(
    b: NnefBuilder,
    input: Value,
    output_size: Sequence[Dim] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
    *,
    how: Resampling,
) -> Value:
    """upsample_bilinear2d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor"""
    sizes, scales = _sizes_and_scales(input, output_size, scale_factors)
    return resampled(b, input, sizes, scales, replace(how, align_corners=align_corners))


# --- antialiased: every position is a weighted sum over its whole axis --------------------------------


def _antialiased(
    b: NnefBuilder, value: Value, sizes: Sequence[Dim], scales: Sequence[float | None], align_corners: bool, mode: str
) -> Value:
    if value.rank != 4:
        raise TranslationError(
            f"antialiased interpolation of a tensor with {value.rank} axes; it needs an image [N, C, H, W]."
        )
    result = widened(b, value)
    for axis, (size, scale) in enumerate(zip(sizes, scales, strict=True), start=2):
        length = value.shape[axis]
        if isinstance(length, int) and isinstance(size, int):
            weights = _written_weights(b, length, size, scale, align_corners, mode, result.dtype)
        else:
            weights = b.cast(_computed_weights(b, length, size, scale, align_corners, mode), result.dtype)
        expression = "bchw,kh->bckw" if axis == 2 else "bchw,kw->bchk"
        result = b.einsum(expression, [result, weights], accumulator=result.dtype)
    return b.cast(result, value.dtype)


def _written_weights(
    b: NnefBuilder, length: int, size: int, scale: float | None, align_corners: bool, mode: str, dtype: torch.dtype
) -> Value:
    """Return the weights [size, length] that PyTorch itself gives to a picture of single ones."""
    if length * size > _MAX_WRITTEN_WEIGHTS:
        raise TranslationError(
            f"antialiased interpolation from {length} to {size} needs too many weights for the graph."
        )
    eye = torch.eye(length, dtype=torch.float64).reshape(1, 1, length, length)
    weights = getattr(aten, f"_upsample_{mode}2d_aa").default(eye, [length, size], align_corners, None, scale)[0, 0]
    return written_out(b, weights.T.contiguous(), dtype)


def _computed_weights(
    b: NnefBuilder, length: Dim, size: Dim, scale: float | None, align_corners: bool, mode: str
) -> Value:
    """Return the weights [size, length] of an axis of dynamic size: the kernel, stretched where the picture shrinks, at distances.

    See ATen/native/cpu/UpSampleKernel.cpp, `_compute_index_ranges_weights`.
    """
    if align_corners:
        raise TranslationError(
            "antialiased interpolation with align_corners at a dynamic size is not supported.",
            "Omit align_corners.",
        )
    f32 = torch.float32
    one = b.scalar(1.0, f32)
    places = b.unsqueeze(_source_positions(b, length, size, scale, Resampling("linear")), [1])
    apart = b.unary("abs", b.binary("sub", b.cast(positions(b, length, 1, 2), f32), places))
    distance = b.binary("div", apart, b.binary("max", _step(b, length, size, scale), one))
    weights = _triangle(b, distance) if mode == "bilinear" else _cubic_kernel(b, distance)
    return b.binary("div", weights, sum_of(b, weights, [1], keepdim=True))


def _triangle(b: NnefBuilder, distance: Value) -> Value:
    above = b.binary("sub", b.scalar(1.0, distance.dtype), distance)
    return b.binary("max", above, b.scalar(0.0, distance.dtype))


def _cubic_kernel(b: NnefBuilder, distance: Value) -> Value:
    """Return Keys' kernel with a = -0.5: both of its polynomials are 0 where the other one holds."""
    one, two = (b.scalar(number, distance.dtype) for number in (1.0, 2.0))
    a = _SMOOTH_CUBIC_A
    inner = _polynomial(b, b.binary("min", distance, one), [a + 2, -(a + 3), 0.0, 1.0])
    outer = _polynomial(b, b.binary("min", b.binary("max", distance, one), two), [a, -5 * a, 8 * a, -4 * a])
    return b.binary("add", inner, outer)


@variant(aten._upsample_bilinear2d_aa.default, mode="bilinear")
@variant(aten._upsample_bicubic2d_aa.default, mode="bicubic")
def upsample_antialiased(
    b: NnefBuilder,
    self: Value,
    output_size: Sequence[Dim],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
    *,
    mode: str,
) -> Value:
    """_upsample_bilinear2d_aa(Tensor self, SymInt[2] output_size, bool align_corners, float? scales_h=None, ...) -> Tensor"""
    return _antialiased(b, self, output_size, [scales_h, scales_w], align_corners, mode)


@variant(aten._upsample_bilinear2d_aa.vec, mode="bilinear")
@variant(aten._upsample_bicubic2d_aa.vec, mode="bicubic")
def upsample_antialiased_vec(
    b: NnefBuilder,
    input: Value,
    output_size: Sequence[Dim] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
    *,
    mode: str,
) -> Value:
    """_upsample_bilinear2d_aa.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? scale_factors) -> Tensor"""
    return _antialiased(b, input, *_sizes_and_scales(input, output_size, scale_factors), align_corners, mode)

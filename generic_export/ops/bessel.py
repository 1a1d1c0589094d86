"""Bessel functions by the polynomials of Abramowitz and Stegun, 9.4 and 9.8: 2e-7 of the leading term."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from generic_export.ops.special import back_to, horner, in_double
from generic_export.ops.variants import given
from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor

# Highest power first. 9.8.1-4, in (x/3.75)^2 and in 3.75/x.
_I0_NEAR = (0.0045813, 0.0360768, 0.2659732, 1.2067492, 3.0899424, 3.5156229, 1.0)
_I0_FAR = (
    0.00392377, -0.01647633, 0.02635537, -0.02057706, 0.00916281, -0.00157565, 0.00225319, 0.01328592, 0.39894228
)  # fmt: skip
_I1_NEAR = (0.00032411, 0.00301532, 0.02658733, 0.15084934, 0.51498869, 0.87890594, 0.5)
_I1_FAR = (
    -0.00420059, 0.01787654, -0.02895312, 0.02282967, -0.01031555, 0.00163801, -0.00362018, -0.03988024, 0.39894228
)  # fmt: skip
# 9.8.5-8, in (x/2)^2 and in 2/x.
_K0_NEAR = (0.00000740, 0.00010750, 0.00262698, 0.03488590, 0.23069756, 0.42278420, -0.57721566)
_K0_FAR = (0.00053208, -0.00251540, 0.00587872, -0.01062446, 0.02189568, -0.07832358, 1.25331414)
_K1_NEAR = (-0.00004686, -0.00110404, -0.01919402, -0.18156897, -0.67278579, 0.15443144, 1.0)
_K1_FAR = (-0.00068245, 0.00325614, -0.00780353, 0.01504268, -0.03655620, 0.23498619, 1.25331414)
# 9.4.1-6, in (x/3)^2 and in 3/x.
_J0_NEAR = (0.0002100, -0.0039444, 0.0444479, -0.3163866, 1.2656208, -2.2499997, 1.0)
_J1_NEAR = (0.00001109, -0.00031761, 0.00443319, -0.03954289, 0.21093573, -0.56249985, 0.5)
_Y0_NEAR = (-0.00024846, 0.00427916, -0.04261214, 0.25300117, -0.74350384, 0.60559366, 0.36746691)
_Y1_NEAR = (0.0027873, -0.0400976, 0.3123951, -1.3164827, 2.1682709, 0.2212091, -0.6366198)
_AMPLITUDE = (
    (0.00014476, -0.00072805, 0.00137237, -0.00009512, -0.00552740, -0.00000077, 0.79788456),
    (-0.00020033, 0.00113653, -0.00249511, 0.00017105, 0.01659667, 0.00000156, 0.79788456),
)
_PHASE = (
    (0.00013558, -0.00029333, -0.00054125, 0.00262573, -0.00003954, -0.04166397, -math.pi / 4),
    (-0.00029166, 0.00079824, 0.00074348, -0.00637879, 0.00005650, 0.12499612, -3 * math.pi / 4),
)


def _modified(size: Tensor, near: Sequence[float], far: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the polynomial near 0, and the one far from it divided by sqrt(x): the factor of exp(x)."""
    t = torch.clamp(size, min=3.75)
    return horner(torch.square(size / 3.75), near), horner(3.75 / t, far) / torch.sqrt(t)


def _first_kind(self: Tensor, *, order: int, scaled: bool) -> Tensor:
    """Modified Bessel function of the first kind, times exp(-|x|) where it is scaled."""
    x = in_double(self)
    size = x.abs()
    near, far = _modified(size, *((_I0_NEAR, _I0_FAR), (_I1_NEAR, _I1_FAR))[order])
    if order:
        near, far = near * x, far * torch.sign(x)
    result = torch.where(size < 3.75, near * torch.exp(-size) if scaled else near, far if scaled else far * size.exp())
    return back_to(result, self)


rewrites(aten.i0.default, aten.special_modified_bessel_i0.default)(given(_first_kind, order=0, scaled=False))
rewrites(aten.special_i0e.default)(given(_first_kind, order=0, scaled=True))
rewrites(aten.special_i1.default, aten.special_modified_bessel_i1.default)(given(_first_kind, order=1, scaled=False))
rewrites(aten.special_i1e.default)(given(_first_kind, order=1, scaled=True))


def _second_kind(x: Tensor, *, order: int, scaled: bool) -> Tensor:
    """Modified Bessel function of the second kind, times exp(x) where it is scaled."""
    value = in_double(x)
    low, high = torch.clamp(value, max=2.0), torch.clamp(value, min=2.0)
    logarithm = torch.log(low * 0.5)
    if order:
        near = horner(torch.square(low * 0.5), _K1_NEAR) / low + logarithm * in_double(torch.special.i1(low))
    else:
        near = horner(torch.square(low * 0.5), _K0_NEAR) - logarithm * in_double(torch.special.i0(low))
    far = horner(2.0 / high, _K1_FAR if order else _K0_FAR) / torch.sqrt(high)
    result = torch.where(
        value <= 2.0, near * torch.exp(low) if scaled else near, far if scaled else far * (-high).exp()
    )
    return back_to(torch.where(value == 0, math.inf, torch.where(value < 0, math.nan, result)), x)


rewrites(aten.special_modified_bessel_k0.default)(given(_second_kind, order=0, scaled=False))
rewrites(aten.special_modified_bessel_k1.default)(given(_second_kind, order=1, scaled=False))
rewrites(aten.special_scaled_modified_bessel_k0.default)(given(_second_kind, order=0, scaled=True))
rewrites(aten.special_scaled_modified_bessel_k1.default)(given(_second_kind, order=1, scaled=True))


def _wave(size: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return amplitude and phase of J and Y beyond 3."""
    t = torch.clamp(size, min=3.0)
    return horner(3.0 / t, _AMPLITUDE[order]) / torch.sqrt(t), t + horner(3.0 / t, _PHASE[order])


def _first_kind_wave(self: Tensor, *, order: int) -> Tensor:
    """Bessel function of the first kind."""
    x = in_double(self)
    size = x.abs()
    amplitude, phase = _wave(size, order)
    near = horner(torch.square(torch.clamp(size, max=3.0) / 3.0), (_J0_NEAR, _J1_NEAR)[order])
    near = x * near if order else near
    is_near, far = size <= 3.0, amplitude * torch.cos(phase)
    return back_to(torch.where(is_near, near, far * torch.sign(x) if order else far), self)


rewrites(aten.special_bessel_j0.default)(given(_first_kind_wave, order=0))
rewrites(aten.special_bessel_j1.default)(given(_first_kind_wave, order=1))


def _weber(self: Tensor, *, order: int) -> Tensor:
    """Bessel function of the second kind."""
    x = in_double(self)
    amplitude, phase = _wave(x, order)
    low = torch.clamp(x, max=3.0)
    smooth = horner(torch.square(low / 3.0), (_Y0_NEAR, _Y1_NEAR)[order])
    first = horner(torch.square(low / 3.0), (_J0_NEAR, _J1_NEAR)[order])
    logarithm = 2.0 / math.pi * torch.log(low * 0.5)
    near = logarithm * first + smooth if order == 0 else logarithm * first * low + smooth / low
    result = torch.where(x <= 3.0, near, amplitude * torch.sin(phase))
    return back_to(torch.where(x == 0, -math.inf, torch.where(x < 0, math.nan, result)), self)


rewrites(aten.special_bessel_y0.default)(given(_weber, order=0))
rewrites(aten.special_bessel_y1.default)(given(_weber, order=1))


@rewrites(aten.special_spherical_bessel_j0.default)
def spherical_j0(x: Tensor) -> Tensor:
    """sin(x) / x"""
    value = back_to(x, x)
    return torch.where(value == 0, 1.0, torch.sin(value) / torch.where(value == 0, 1.0, value)).to(value.dtype)

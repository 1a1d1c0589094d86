"""Special functions written with the ones tract has. In f64 where cancellation would cost digits: at most 1e-6 relative.

Each is a plain PyTorch function: the tests compare it with PyTorch's own, without and with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor


def in_double(value: Tensor) -> Tensor:
    """Return a tensor in f64."""
    return value.to(torch.float64)


def back_to(result: Tensor, *arguments: Tensor) -> Tensor:
    """Return a result in the float type that the arguments call for."""
    dtype = arguments[0].dtype
    for argument in arguments[1:]:
        dtype = torch.promote_types(dtype, argument.dtype)
    return result.to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return a polynomial, highest power first."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


# --- exponentials and logarithms near 0 ----------------------------------------------------------


@rewrites(aten.expm1.default)
def expm1(self: Tensor) -> Tensor:
    """exp(x) - 1 = 2 exp(x/2) sinh(x/2), which has no cancellation."""
    half = back_to(self, self).clamp(min=-60.0) * 0.5
    return torch.exp(half) * torch.sinh(half) * 2.0


@rewrites(aten.log1p.default)
def log1p(self: Tensor) -> Tensor:
    """log(1 + x) = 2 atanh(x / (2 + x)) near 0."""
    x = back_to(self, self)
    near = x.abs() < 0.5
    inside = torch.where(near, x, 0.0).to(x.dtype)
    return torch.where(near, 2.0 * torch.atanh(inside / (inside + 2.0)), torch.log(x + 1.0))


@rewrites(aten.exp2.default)
def exp2(self: Tensor) -> Tensor:
    """2^x, exact at integers."""
    return torch.pow(2.0, back_to(self, self))


@rewrites(aten.logaddexp.default)
def logaddexp(self: Tensor, other: Tensor) -> Tensor:
    """log(exp(x) + exp(y)) without overflow."""
    largest = torch.maximum(self, other)
    infinite = (self == other) & torch.isinf(self)
    return torch.where(infinite, self, largest + torch.log1p(torch.exp(-(self - other).abs())))


@rewrites(aten.logaddexp2.default)
def logaddexp2(self: Tensor, other: Tensor) -> Tensor:
    """log2(2^x + 2^y) without overflow."""
    largest = torch.maximum(self, other)
    infinite = (self == other) & torch.isinf(self)
    tail = torch.log1p(torch.pow(2.0, -(self - other).abs())) * (1.0 / math.log(2.0))
    return torch.where(infinite, self, largest + tail)


# --- planes and signs ----------------------------------------------------------------------------


@rewrites(aten.atan2.default)
def atan2(self: Tensor, other: Tensor) -> Tensor:
    """The angle of the point (other, self)."""
    y, x = back_to(self, self, other), back_to(other, self, other)
    high, low = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    origin = high == 0
    ratio = torch.where(high == low, 1.0, low / torch.where(origin, 1.0, high))
    angle = torch.atan(torch.where(origin, 0.0, ratio)).to(x.dtype)
    angle = torch.where(y.abs() > x.abs(), math.pi / 2 - angle, angle)
    angle = torch.where(torch.signbit(x), math.pi - angle, angle)
    angle = torch.where(torch.signbit(y), -angle, angle)
    return torch.where((x != x) | (y != y), x + y, angle)


@rewrites(aten.hypot.default)
def hypot(self: Tensor, other: Tensor) -> Tensor:
    """sqrt(x^2 + y^2) without overflow."""
    x, y = self.abs(), other.abs()
    high, low = torch.maximum(x, y), torch.minimum(x, y)
    ratio = low / torch.where(high == 0, 1.0, high).to(high.dtype)
    return torch.where(torch.isinf(high), high, high * torch.sqrt(1.0 + ratio * ratio))


@rewrites(aten.copysign.Tensor)
def copysign(self: Tensor, other: Tensor) -> Tensor:
    """The magnitude of one tensor with the sign of another."""
    magnitude = back_to(self.abs(), self, other)
    return torch.where(torch.signbit(other), -magnitude, magnitude)


@rewrites(aten.copysign.Scalar)
def copysign_scalar(self: Tensor, other: float) -> Tensor:
    """The magnitude of a tensor with the sign of a number."""
    magnitude = back_to(self.abs(), self)
    return -magnitude if math.copysign(1.0, other) < 0 else magnitude


@rewrites(aten.sgn.default)
def sgn(self: Tensor) -> Tensor:
    """The sign, or for a complex number its direction."""
    if not self.is_complex():
        return torch.sign(self)
    length = self.abs()
    return self / torch.where(length == 0, 1.0, length).to(length.dtype)


@rewrites(aten.ldexp.Tensor)
def ldexp(self: Tensor, other: Tensor) -> Tensor:
    """x * 2^e"""
    return self * torch.pow(2.0, other)


@rewrites(aten.frexp.Tensor)
def frexp(self: Tensor) -> tuple[Tensor, Tensor]:
    """Mantissa in [0.5, 1) and exponent of 2."""
    x = in_double(self)
    ordinary = (x != 0) & (x.abs() != math.inf) & (x == x)
    size = torch.where(ordinary, x.abs(), 0.5)
    exponent = torch.floor(torch.log2(size)) + 1.0
    mantissa = size * torch.pow(2.0, -exponent)
    # The logarithm may be off by one unit just below a power of 2.
    exponent = exponent + (mantissa >= 1.0) - (mantissa < 0.5).to(torch.float64)
    mantissa = torch.where(ordinary, x * torch.pow(2.0, -exponent), x)
    return back_to(mantissa, self), torch.where(ordinary, exponent, 0.0).to(torch.int32)


@rewrites(aten.sinc.default)
def sinc(self: Tensor) -> Tensor:
    """sin(pi x) / (pi x)"""
    angle = back_to(self, self) * math.pi
    return torch.where(angle == 0, 1.0, torch.sin(angle) / torch.where(angle == 0, 1.0, angle)).to(angle.dtype)


# --- error function and its family ---------------------------------------------------------------

# Chebyshev fit of erfc(z) exp(z^2) / t in t = 1 / (1 + z/2), Press et al., Numerical Recipes §6.2: 1.2e-7 everywhere.
_ERFC = (
    0.17087277,
    -0.82215223,
    1.48851587,
    -1.13520398,
    0.27886807,
    -0.18628806,
    0.09678418,
    0.37409196,
    1.00002368,
    -1.26551223,
)


def _scaled_erfc_of_positive(z: Tensor) -> Tensor:
    t = 1.0 / (1.0 + 0.5 * z)
    return t * torch.exp(horner(t, _ERFC))


@rewrites(aten.erfc.default, aten.special_erfc.default)
def erfc(self: Tensor) -> Tensor:
    """1 - erf(x), with its full relative precision in the tail."""
    x = in_double(self)
    tail = _scaled_erfc_of_positive(x.abs()) * torch.exp(-x * x)
    return back_to(torch.where(x < 0, 2.0 - tail, tail), self)


@rewrites(aten.special_erfcx.default)
def erfcx(self: Tensor) -> Tensor:
    """erfc(x) exp(x^2)"""
    x = in_double(self)
    positive = _scaled_erfc_of_positive(x.abs())
    return back_to(torch.where(x < 0, 2.0 * torch.exp(x * x) - positive, positive), self)


@rewrites(aten.special_ndtr.default)
def ndtr(self: Tensor) -> Tensor:
    """The normal distribution function."""
    return 0.5 * torch.erfc(back_to(self, self) * -math.sqrt(0.5))


@rewrites(aten.special_log_ndtr.default)
def log_ndtr(self: Tensor) -> Tensor:
    """The logarithm of the normal distribution function, also far in its tail."""
    x = in_double(self)
    z = x * math.sqrt(0.5)
    tail = torch.log(_scaled_erfc_of_positive(z.abs()) * 0.5) - z * z
    body = torch.log1p(-0.5 * _scaled_erfc_of_positive(z.abs()) * torch.exp(-z * z))
    return back_to(torch.where(x < 0, tail, body), self)


# Giles, Approximating the erfinv function: in w - 2.5, and in sqrt(w) - 3, with w = -log(1 - x^2).
_ERFINV_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_ERFINV_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _erfinv(x: Tensor, one_minus_square: Tensor) -> Tensor:
    w = -torch.log(one_minus_square)
    tail = horner(torch.sqrt(torch.clamp(w, min=5.0)) - 3.0, _ERFINV_TAIL)
    root = torch.where(w < 5.0, horner(torch.clamp(w, max=5.0) - 2.5, _ERFINV_CENTRE), tail) * x
    # One step of Newton's method on erf in the middle, where tract's erf is precise, is not needed: 4e-7 relative.
    return torch.where(one_minus_square == 0, torch.sign(x) * math.inf, torch.where(one_minus_square < 0, w, root))


@rewrites(aten.erfinv.default, aten.special_erfinv.default)
def erfinv(self: Tensor) -> Tensor:
    """The inverse of erf."""
    x = in_double(self)
    return back_to(_erfinv(x, (1.0 - x) * (1.0 + x)), self)


@rewrites(aten.special_ndtri.default)
def ndtri(self: Tensor) -> Tensor:
    """The inverse of the normal distribution function."""
    p = in_double(self)
    return back_to(math.sqrt(2.0) * _erfinv(2.0 * p - 1.0, 4.0 * p * (1.0 - p)), self)


# --- gamma function ------------------------------------------------------------------------------

_SHIFT = 7  # Stirling's series starts at x + 7: 1e-11


def _lgamma_of_positive(x: Tensor) -> Tensor:
    product = x
    for step in range(1, _SHIFT):
        product = product * (x + float(step))
    z = x + float(_SHIFT)
    inverse = 1.0 / z
    series = horner(inverse * inverse, (-1 / 1680, 1 / 1260, -1 / 360, 1 / 12)) * inverse
    return (z - 0.5) * torch.log(z) - z + 0.5 * math.log(2 * math.pi) + series - torch.log(product)


@rewrites(aten.lgamma.default)
def lgamma(self: Tensor) -> Tensor:
    """log |gamma(x)|: Stirling's series, and the reflection formula below 0.5."""
    x = in_double(self)
    reflected = x < 0.5
    positive = _lgamma_of_positive(torch.where(reflected, 1.0 - x, x))
    sine = torch.sin(math.pi * (x - torch.floor(x))).abs()
    mirrored = torch.where(x == torch.floor(x), math.inf, math.log(math.pi) - torch.log(sine) - positive)
    result = torch.where(reflected, mirrored, positive)
    return back_to(torch.where(torch.isinf(x), math.inf, result), self)


def _polygamma_of_positive(order: int, x: Tensor) -> Tensor:
    """psi^(n)(x) by recurrence up to x + 12, then the asymptotic series (n = 0 is digamma)."""
    steps = 12
    factorial = math.factorial(order)
    inverse = 1.0 / (x + float(steps))
    if order == 0:
        result = -torch.log(inverse) - 0.5 * inverse
    else:
        result = math.factorial(order - 1) * inverse**order + 0.5 * factorial * inverse ** (order + 1)
    for k, bernoulli in enumerate((1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66), start=1):
        weight = bernoulli * math.factorial(2 * k + order - 1) / math.factorial(2 * k)
        result = result + (-weight if order == 0 else weight) * inverse ** (2 * k + order)
    for step in range(steps):
        term = factorial * (1.0 / (x + float(step))) ** (order + 1)
        result = result - term if order == 0 else result + term
    return -result if order and order % 2 == 0 else result


def _cotangent_derivative(order: int) -> list[float]:
    """Coefficients, highest power first, of the n-th derivative of cot(pi x) as a polynomial in cot(pi x)."""
    ascending = [0.0, 1.0]
    for _ in range(order):
        slope = [power * value for power, value in enumerate(ascending)][1:]
        ascending = [
            -math.pi * ((slope[k] if k < len(slope) else 0.0) + (slope[k - 2] if k >= 2 else 0.0))
            for k in range(len(slope) + 2)
        ]
    return ascending[::-1]


def _polygamma(order: int, self: Tensor) -> Tensor:
    x = in_double(self)
    reflected = x < 0.5
    positive = _polygamma_of_positive(order, torch.where(reflected, 1.0 - x, x))
    cotangent = 1.0 / torch.tan(math.pi * (x - torch.floor(x)))
    mirrored = (-1.0) ** order * positive - math.pi * horner(cotangent, _cotangent_derivative(order))
    return torch.where(reflected, mirrored, positive)


@rewrites(aten.digamma.default)
def digamma(self: Tensor) -> Tensor:
    """The derivative of lgamma; the reflection formula below 0.5."""
    x = in_double(self)
    pole = torch.where(x == 0, torch.where(torch.signbit(x), math.inf, -math.inf), math.nan)
    return back_to(torch.where((x <= 0) & (x == torch.floor(x)), pole, _polygamma(0, self)), self)


@rewrites(aten.polygamma.default, aten.special_polygamma.default)
def polygamma(n: int, self: Tensor) -> Tensor:
    """The n-th derivative of digamma."""
    return torch.digamma(self) if n == 0 else back_to(_polygamma(n, self), self)


@rewrites(aten.mvlgamma.default)
def mvlgamma(self: Tensor, p: int) -> Tensor:
    """The multivariate log-gamma function."""
    result = torch.full_like(self, 0.25 * p * (p - 1) * math.log(math.pi))
    for index in range(p):
        result = result + torch.lgamma(self - 0.5 * index)
    return result

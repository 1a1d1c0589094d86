"""Hurwitz' zeta function by the sum of Euler and Maclaurin, and Airy's function by its series, in f64."""

from __future__ import annotations

import math

import torch

from generic_export.ops.special import back_to, horner, in_double
from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor

_FIRST_TERMS = 12
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)


def _zeta_of_positive(s: Tensor, q: Tensor) -> Tensor:
    """The first terms, and what follows them: Abramowitz & Stegun 23.1.30."""
    result = torch.zeros_like(s)
    for step in range(_FIRST_TERMS):
        result = result + (q + float(step)) ** -s
    end = q + float(_FIRST_TERMS)
    height = end**-s
    result = result + height * end / (s - 1.0) + 0.5 * height
    rising, power = s, height / end
    for index, number in enumerate(_BERNOULLI, start=1):
        result = result + number / math.factorial(2 * index) * rising * power
        rising = rising * (s + (2.0 * index - 1.0)) * (s + 2.0 * index)
        power = power / (end * end)
    return result


@rewrites(aten.special_zeta.default)
def zeta(self: Tensor, other: Tensor) -> Tensor:
    """The sum of (q + n)^-s over n from 0: infinite at s = 1 and at the poles, NaN for s < 1 and below 0 where s is no integer."""
    s, q = torch.broadcast_tensors(in_double(self), in_double(other))
    order = torch.where(s > 1, s, 2.0)
    floor = torch.floor(q)
    pole, below, whole = (q <= 0) & (q == floor), q < 0, s == torch.floor(s)
    rest = torch.where(pole, 0.5, q - floor)  # in [0, 1)
    start = torch.where(below, rest, torch.where(pole, 1.0, q))
    result = _zeta_of_positive(order, start)
    # Below 0 the terms before the first positive one are those of 1 - rest up to 1 - q, with the sign of an odd power.
    mirrored = torch.where(below & ~pole, q, -1.0)
    sign = torch.where(torch.remainder(order, 2.0) == 0, 1.0, -1.0)
    before = sign * (_zeta_of_positive(order, 1.0 - rest) - _zeta_of_positive(order, 1.0 - mirrored))
    result = torch.where(below, result + before, result)
    result = torch.where(pole, math.inf, torch.where(below & ~whole, math.nan, result))
    return back_to(torch.where(s == 1, math.inf, torch.where(s < 1, math.nan, result)), self, other)


@rewrites(aten.special_zeta.other_scalar)
def zeta_of_scalar(self: Tensor, other: float) -> Tensor:
    """The same, of one q."""
    return zeta(self, torch.full((), float(other), dtype=back_to(self, self).dtype))


@rewrites(aten.special_zeta.self_scalar)
def zeta_at_scalar(self: float, other: Tensor) -> Tensor:
    """The same, of one s."""
    return zeta(torch.full((), float(self), dtype=back_to(other, other).dtype), other)


# --- Airy's function -------------------------------------------------------------------------------

# Abramowitz & Stegun 10.4.2-5: Ai(x) = c1 f(x) - c2 g(x), both series of x^3; 10.4.59-60 far from 0.
_AI_0, _AI_SLOPE = 0.355028053887817239, 0.258819403792806798
_NEAR_TERMS = 24
_NEAR_FROM, _NEAR_TO = -6.5, 6.0


def _series_of_cubes() -> tuple[list[float], list[float]]:
    """Coefficients of f and of g / x, highest power of (x / 4)^3 first: those of x^3 are smaller than numbers that tract keeps."""
    f, g = [1.0], [1.0]
    for k in range(1, _NEAR_TERMS):
        f.append(64 * f[-1] / ((3 * k - 1) * (3 * k)))
        g.append(64 * g[-1] / ((3 * k) * (3 * k + 1)))
    return f[::-1], g[::-1]


def _far_coefficients(count: int) -> list[float]:
    """c_k of 10.4.58."""
    values = [1.0]
    for k in range(1, count):
        values.append(values[-1] * (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216.0 * k * (2 * k - 1)))
    return values


@rewrites(aten.special_airy_ai.default)
def airy_ai(x: Tensor) -> Tensor:
    """Ai(x)."""
    wide = in_double(x)
    near = torch.clamp(wide, _NEAR_FROM, _NEAR_TO)
    cube = near * near * near / 64
    f, g = _series_of_cubes()
    middle = _AI_0 * horner(cube, f) - _AI_SLOPE * near * horner(cube, g)
    size = torch.where(wide > 0, torch.clamp(wide, min=_NEAR_TO), torch.clamp(-wide, min=-_NEAR_FROM))
    zeta = 2.0 / 3.0 * size * torch.sqrt(size)
    inverse = 1.0 / zeta
    scale = 1.0 / (math.sqrt(math.pi) * torch.sqrt(torch.sqrt(size)))
    c = _far_coefficients(16)
    falling = 0.5 * scale * torch.exp(-zeta) * horner(-inverse, c[::-1])
    even = horner(-inverse * inverse, c[0::2][::-1])
    odd = inverse * horner(-inverse * inverse, c[1::2][::-1])
    phase = zeta + math.pi / 4
    swinging = scale * (torch.sin(phase) * even - torch.cos(phase) * odd)
    result = torch.where(wide > _NEAR_TO, falling, torch.where(wide < _NEAR_FROM, swinging, middle))
    return back_to(result, x)

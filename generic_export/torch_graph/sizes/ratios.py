"""Sizes that Python computes with floats, as divisions of integers that give the same number.

`round(size / 1.2)` becomes `(10*size + 6) // 12`: a fraction that every size up to `CHECKED` was compared at. Where Python's own
rounding errors follow no fraction (`int(size * 0.7)` is 62 at 90, and 7 at 10), the number is taken for the fraction that it was
meant to be, and the first size at which Python says something else is told.

In: the real expression inside a rounding. Out: an integer one, or None where no fraction does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import sympy
import torch

from generic_export.compat import torch_sympy

CHECKED = 1 << 20
"""The largest size that formulas are compared at."""

_SIMPLE = (64, 4096)  # denominators that are tried before those that no size below `CHECKED` can tell from the number

_FEW = 0.05  # of all sizes

_ROUNDINGS: dict[type, Callable[[np.ndarray], np.ndarray]] = {
    torch_sympy.TruncToInt: np.trunc,
    torch_sympy.FloorToInt: np.floor,
    torch_sympy.CeilToInt: np.ceil,
    torch_sympy.RoundToInt: np.round,  # halves to even, as Python
}
ROUNDINGS = tuple(_ROUNDINGS)
"""PyTorch's functions from real numbers to sizes."""

_Rounding = Callable[[torch.SymFloat], torch.SymInt]


def integer_quotient(rounding: Any, inner: sympy.Expr) -> sympy.Expr | None:
    """Return `rounding(inner)` as a division of integers, where `inner` is a size times or over numbers.

    Args:
        rounding: of `ROUNDINGS`, a class of PyTorch's.
        inner: real.
    """
    found = _scaled_size(inner)
    if found is None:
        return None
    size, steps = found
    turned = size.could_extract_minus_sign()
    if turned != (sum(number < 0 for _, number in steps) % 2 == 1):
        return None  # a negative number
    size, steps = -size if turned else size, tuple((operation, abs(number)) for operation, number in steps)
    ratio, differs = _ratio(rounding, steps)
    if ratio is None:
        return None
    if differs is not None:
        warnings.warn(
            f"{rounding.__name__}({inner}): Python's floats give another number than {ratio} * {size} where that is {differs} "
            "(and at few others); the archive computes with the fraction.",
            stacklevel=2,
        )
    return torch_sympy.FloorDiv(*_divided(ratio, rounding, size))


_Step = tuple[str, float]
"""What is done to a size: `mul` or `div`, and by which number."""


def _scaled_size(inner: sympy.Expr) -> tuple[sympy.Expr, tuple[_Step, ...]] | None:
    """Return the size that a number is made of, and how; None of sums of real numbers."""
    if isinstance(inner, torch_sympy.ToFloat):
        return inner.args[0], ()
    if isinstance(inner, (torch_sympy.IntTrueDiv, torch_sympy.FloatTrueDiv)):
        dividend, divisor = inner.args
        if not divisor.is_number or divisor == 0:
            return None
        found = (dividend, ()) if isinstance(inner, torch_sympy.IntTrueDiv) else _scaled_size(dividend)
        return None if found is None else (found[0], (*found[1], ("div", float(divisor))))
    factor, rest = inner.as_coeff_Mul()
    if factor in (0, 1):
        return None
    found = _scaled_size(rest)
    return None if found is None else (found[0], (*found[1], ("mul", float(factor))))


@lru_cache(maxsize=256)
def _ratio(rounding: Any, steps: tuple[_Step, ...]) -> tuple[Fraction | None, int | None]:
    """Return the simplest fraction that stands for steps under a rounding, and the first size at which it does not."""
    exact, values = Fraction(1), np.arange(CHECKED + 1, dtype=np.float64)
    for operation, number in steps:
        exact = exact * Fraction(number) if operation == "mul" else exact / Fraction(number)
        values = values * number if operation == "mul" else values / number
    wanted = _ROUNDINGS[rounding](values).astype(np.int64)
    simple = [exact.limit_denominator(most) for most in _SIMPLE]
    for each in (*simple, _neighbour(exact, rounding)):
        if each and not len(_differences(each, rounding, wanted)):
            return each, None
    meant = next((each for each in simple if each and float(each) == float(exact)), None)
    if meant is None:
        return None, None
    differences = _differences(meant, rounding, wanted)
    return (meant, int(differences[0])) if len(differences) < _FEW * CHECKED else (None, None)


def _differences(ratio: Fraction, rounding: Any, wanted: np.ndarray) -> np.ndarray:
    """Return the sizes at which a fraction gives something else than what is wanted."""
    dividends, divisor = _divided(ratio, rounding, np.arange(CHECKED + 1, dtype=np.int64))
    return np.flatnonzero(dividends // divisor != wanted)


def _divided(ratio: Fraction, rounding: Any, size: Any) -> tuple[Any, int]:
    """Return what is divided, and by what, for a size times a fraction, rounded: of a sympy size, or of an array of sizes."""
    up, down = ratio.numerator, ratio.denominator
    if rounding is torch_sympy.RoundToInt:
        return 2 * up * size + down, 2 * down
    return up * size + (down - 1 if rounding is torch_sympy.CeilToInt else 0), down


def _neighbour(value: Fraction, rounding: type[sympy.Function]) -> Fraction:
    """Return the fraction next to a number that no size, nor half of one, lies between.

    It is the nearest one below it, and for rounding up the nearest one above, of all whose denominators sizes can be (Farey): then
    no size times the number passes a whole one that the size times the fraction does not.
    """
    most, sign = 2 * CHECKED, 1 if rounding is not torch_sympy.CeilToInt else -1
    nearest = value.limit_denominator(most)
    if sign * nearest <= sign * value:
        return nearest
    up, down = nearest.numerator, nearest.denominator
    if down == 1:  # the whole number itself: next to it is what differs by the smallest part
        return nearest - Fraction(sign, most)
    first = pow(sign * up, -1, down)
    below = first + (most - first) // down * down
    return Fraction((up * below - sign) // down, below)


# `math.ceil(size / 2)` and `math.floor(size / 2 + 1)` as divisions of integers, while a module is captured.
# Padding as in TensorFlow is counted so (timm's `tf_` models, NASNet). PyTorch keeps the division of floats inside the
# rounding: then nothing cancels, each layer's sizes hold those of all layers before, and a capture takes minutes, then
# hours. Sizes are below 2^52, where both are the same number.
@contextmanager
def whole_quotients() -> Iterator[None]:
    """Round quotients of sizes and numbers without floats, for the length of the block."""
    number: Any = torch.SymFloat  # its methods are made when PyTorch starts, which types do not tell
    ceil = _without_floats(number.__ceil__, lambda size, divisor: (size + (divisor - 1)) // divisor)
    floor = _without_floats(number.__floor__, lambda size, divisor: size // divisor)
    with (
        mock.patch.object(number, "__ceil__", ceil),
        mock.patch.object(number, "__floor__", floor),
    ):
        yield


def _without_floats(rounded: _Rounding, divided: Callable[[torch.SymInt, int], torch.SymInt]) -> _Rounding:
    def function(value: torch.SymFloat) -> torch.SymInt:
        constant, quotient = value.node.expr.as_coeff_Add()
        more = float(constant)  # sympy takes 1.0 and 1 for two numbers
        if not isinstance(quotient, torch_sympy.IntTrueDiv) or not more.is_integer():
            return rounded(value)
        size, divisor = quotient.args
        if not divisor.is_Integer or divisor <= 0:
            return rounded(value)
        sizes: Any = value.node.shape_env
        whole = sizes.create_symintnode(size, hint=None)
        return (whole if divisor == 1 else divided(whole, int(divisor))) + int(more)

    return function


__all__ = ["CHECKED", "ROUNDINGS", "integer_quotient", "whole_quotients"]

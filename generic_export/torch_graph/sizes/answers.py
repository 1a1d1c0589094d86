"""Questions about sizes that PyTorch would answer by its example, and ask of every size: answered where that can be proved.

In: a comparison of sizes and the smallest that each may be. Out: True, False, or None where neither is proved. PyTorch bounds sums
and products; `(2*s - 1) % s != 0` (XLNet's relative positions) and `min(8, s) <= s` need more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from random import Random
from typing import Any

import sympy

from generic_export.compat import EXTREMA, REMAINDERS, comparisons_answered, torch_sympy
from generic_export.torch_graph.sizes.proofs import (
    computed,
    growth,
    is_zero,
    never_negative,
    without_needless_extrema,
    without_symbolic_divisors,
)

_FEW = (0, 1, 2, 3, 5, 6, 7, 8, 14, 30, 64, 321, 4999)
_MOST_OPERATIONS = 40

_UNBOUNDED = (torch_sympy.FloorDiv, *REMAINDERS, *EXTREMA)


@contextmanager
def proved_sizes() -> Iterator[None]:
    """Let a capture know what is proved here, for the length of the block."""
    with comparisons_answered(answer):
        yield


def answer(comparison: sympy.Basic, least: Mapping[sympy.Symbol, int]) -> bool | None:
    """Say whether a comparison of sizes holds for all of them, or for none.

    Args:
        comparison: of two expressions over integers.
        least: the smallest value of each symbol in it.
    """
    if isinstance(comparison, (sympy.And, sympy.Or)):
        return _joined(comparison, least)
    if not isinstance(comparison, sympy.core.relational.Relational) or not comparison.free_symbols <= least.keys():
        return None
    return _answer(comparison, tuple((symbol, least[symbol]) for symbol in sorted(comparison.free_symbols, key=str)))


def proved(comparison: sympy.Basic, least: Mapping[sympy.Symbol, int]) -> bool:
    """Say whether a comparison is proved to hold for all sizes; sums and products too, which `answer` leaves to PyTorch."""
    if isinstance(comparison, (sympy.And, sympy.Or)):
        every = isinstance(comparison, sympy.And)
        return (all if every else any)(proved(each, least) for each in comparison.args)
    if comparison.is_Boolean and not comparison.free_symbols:
        return bool(comparison)
    if not isinstance(comparison, sympy.core.relational.Relational) or not comparison.free_symbols <= least.keys():
        return False
    shifted = {
        symbol: sympy.Dummy(symbol.name, integer=True, nonnegative=True) + least[symbol]
        for symbol in comparison.free_symbols
    }
    difference = without_needless_extrema((comparison.lhs - comparison.rhs).subs(shifted))
    if not _may_be_settled(type(comparison), difference):
        return False
    kind = type(comparison)
    return _settled(kind, difference) is True or _is_product_above(kind, difference)


def _joined(condition: sympy.Basic, least: Mapping[sympy.Symbol, int]) -> bool | None:
    """Say whether all of several comparisons hold, or one of them does."""
    decides = isinstance(condition, sympy.Or)
    found = [answer(each, least) for each in condition.args]
    return decides if decides in found else None if None in found else not decides


@lru_cache(maxsize=8192)
def _answer(comparison: sympy.Basic, bounds: tuple[tuple[sympy.Symbol, int], ...]) -> bool | None:
    """PyTorch asks the same for every tensor. Sums and products it bounds well by itself."""
    least = dict(bounds)
    if not least or not comparison.has(*_UNBOUNDED) or comparison.count_ops() > _MOST_OPERATIONS:
        return None
    if comparison.has(sympy.Float, torch_sympy.ToFloat):
        return None
    difference = _difference(comparison, least)
    return _settled(type(comparison), difference) if _may_be_settled(type(comparison), difference) else None


def _difference(comparison: Any, least: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """Return what a comparison compares with 0, over sizes that begin at 0."""
    above = {symbol: sympy.Dummy(symbol.name, integer=True, nonnegative=True) for symbol in comparison.free_symbols}
    shifted = {symbol: free + least[symbol] for symbol, free in above.items()}
    return without_needless_extrema(without_symbolic_divisors((comparison.lhs - comparison.rhs).subs(shifted)))


def _may_be_settled(kind: type, difference: sympy.Expr) -> bool:
    """Say whether a comparison with 0 comes out the same at a few sizes: most do not, and need no attempt at a proof."""
    symbols = sorted(difference.free_symbols, key=str)
    at = computed(difference)
    try:
        found = [at(dict(zip(symbols, sizes, strict=True))) for sizes in _few_sizes(len(symbols))]
    except (NameError, TypeError, ZeroDivisionError):  # a function of PyTorch's that numbers alone do not have
        return True
    return len({bool(kind(value, 0)) for value in found}) == 1


@lru_cache(maxsize=16)
def _few_sizes(count: int) -> tuple[tuple[int, ...], ...]:
    """Return some sizes of so many symbols, small and large ones together."""
    random = Random(0)
    return ((0,) * count, *(tuple(random.choice(_FEW) for _ in range(count)) for _ in range(3 * len(_FEW))))


def _settled(kind: type, difference: sympy.Expr) -> bool | None:
    """Say how a difference of two sizes compares with 0."""
    if kind in (sympy.Lt, sympy.Le):
        return _settled(sympy.Gt if kind is sympy.Lt else sympy.Ge, -difference)
    if kind is sympy.Ne:
        equal = _settled(sympy.Eq, difference)
        return None if equal is None else not equal
    above, below = _at_least(difference, 1), _at_least(-difference, 1)
    if kind is sympy.Eq:
        plain = sympy.expand(_without_symbolic_remainders(difference))
        return True if plain == 0 or is_zero(plain) else False if above or below else None
    if kind is sympy.Gt:
        return True if above else False if _at_least(-difference, 0) else None
    return True if _at_least(difference, 0) else False if below else None


def _at_least(expr: sympy.Expr, least: int) -> bool:
    """Say whether it is proved that an expression over sizes from 0 is never below a number."""
    factors = sympy.Mul.make_args(expr)
    if least in (0, 1) and len(factors) > 1 and all(_at_least(factor, least) for factor in factors):
        return True  # a tensor has no less than nothing along each of its axes
    return never_negative(sympy.expand(_without_symbolic_remainders(expr)) - least)


def _is_product_above(kind: type, difference: sympy.Expr) -> bool:
    """Say whether a product is proved to be above, or not below, 0: none of its factors is on both sides of it at some sizes.

    So is `-2*b*(-h // 7)`: Python's way to round up is `-(-h // 7)`.
    """
    if kind in (sympy.Lt, sympy.Le):
        return _is_product_above(sympy.Gt if kind is sympy.Lt else sympy.Ge, -difference)
    if kind not in (sympy.Gt, sympy.Ge):
        return False
    least = sympy.expand(difference) - (1 if kind is sympy.Gt else 0)
    number, factors = sympy.factor_terms(least).as_coeff_mul()
    signs = [1 if never_negative(each) else -1 if never_negative(-each) else 0 for each in factors]
    return len(signs) > 1 and number * math.prod(signs) > 0


def _without_symbolic_remainders(expr: sympy.Expr) -> sympy.Expr:
    """Return `p % q` as `p - k*q`, and `p // q` as `k`, wherever a number k is proved to be that quotient."""
    for function in (torch_sympy.FloorDiv, *REMAINDERS):
        expr = expr.replace(function, lambda base, divisor, f=function: _divided(f, base, divisor))
    return expr


def _divided(function: Any, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    times = sympy.cancel(base / divisor) if divisor.free_symbols else None
    if times is not None and times.is_Integer:
        return times if function is torch_sympy.FloorDiv else sympy.Integer(0)
    if not divisor.free_symbols or len(base.free_symbols) != 1 or base.free_symbols != divisor.free_symbols:
        return function(base, divisor)
    quotient = _quotient(*_of_one_size(sympy.expand(base), sympy.expand(divisor)))
    if quotient is None:
        return function(base, divisor)
    return sympy.Integer(quotient) if function is torch_sympy.FloorDiv else sympy.expand(base - quotient * divisor)


def _of_one_size(base: sympy.Expr, divisor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return both over a quotient that they are made of, in the place of the size: a strided convolution has `(t - 1) // 4 + 1`."""
    quotients = divisor.atoms(torch_sympy.FloorDiv)
    outermost = [each for each in quotients if not any(each is not other and other.has(each) for other in quotients)]
    if len(outermost) != 1:
        return base, divisor
    (part,), (symbol,) = outermost, divisor.free_symbols
    least = computed(part)({symbol: 0})
    free = sympy.Dummy("quotient", integer=True, nonnegative=True)
    replaced = [sympy.expand(each.subs(part, free + least)) for each in (base, divisor)]
    if any(each.has(symbol) for each in replaced) or not never_negative(part - least):
        return base, divisor
    return replaced[0], replaced[1]


@lru_cache(maxsize=1024)
def _quotient(base: sympy.Expr, divisor: sympy.Expr) -> int | None:
    """Return the number k for which `k*divisor <= base < (k+1)*divisor` at every size, if there is one."""
    rates = growth(base), growth(divisor)
    if rates[0] is None or not rates[1]:
        return None
    ratio = rates[0] / rates[1]
    for quotient in (int(sympy.floor(ratio)), int(sympy.ceiling(ratio)) - 1):
        rest = sympy.expand(base - quotient * divisor)
        if never_negative(rest, 0) and never_negative(sympy.expand(divisor - 1 - rest), 0):
            return quotient
    return None


__all__ = ["answer", "proved", "proved_sizes"]

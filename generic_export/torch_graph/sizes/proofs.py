"""Facts about sizes that sympy does not find, proved by trying one period: multiples, signs, the smaller of two.

In: sympy expressions over sizes, built of sums, products with constants, integer divisions and remainders by constants. Such
an expression grows by the same amount over every period of its divisions, so that one period is a proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from generic_export.compat import EXTREMA, REMAINDERS, SMALLER, PythonPrinter, torch_sympy

_MAX_TRIALS = 4096
_MOST_OPERATIONS = 400
_FUNCTIONS = {
    "math": math,
    "__builtins__": {"min": min, "max": max, "abs": abs, "int": int, "float": float, "round": round},
}
_EXTREMA = {torch_sympy.Min: 1, torch_sympy.Max: -1, sympy.Min: 1, sympy.Max: -1}

Sizes = Mapping[sympy.Symbol, int]


def without_symbolic_divisors(expr: sympy.Expr) -> sympy.Expr:
    """Return a size with `n // (n // 4)` as 4 wherever `n` is a multiple of 4, as an axis split in fours is.

    So are `4 n // 4` and `n**2 // n` with n, `b n // 4` is `b (n // 4)`, and with `n = m + (-m % 4)`, `4 b (n // 4) // n` is b.
    """
    return expr.replace(torch_sympy.FloorDiv, _constant_quotient)


def _constant_quotient(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    if isinstance(divisor, torch_sympy.FloorDiv) and divisor.args[1].is_Integer:
        whole, part = divisor.args
        if sympy.expand(base - whole) == 0 and is_multiple(whole, int(part)):
            return part
    if (divisor.is_Integer and divisor > 1) or divisor.is_Symbol:
        quotient = sympy.expand(base / divisor)
        if quotient.is_polynomial(*quotient.free_symbols) and all(
            term.as_coeff_Mul()[0].is_Integer for term in sympy.Add.make_args(quotient)
        ):
            return quotient
    factors = sympy.Mul.make_args(sympy.factor_terms(base))
    whole = next((each for each in factors if _is_whole(each, divisor)), None) if len(factors) > 1 else None
    if whole is not None:
        rest = sympy.Mul(*(each for each in factors if each is not whole))
        return rest if whole == divisor else rest * torch_sympy.FloorDiv(whole, divisor)
    return _quotient_of_filled(base, divisor) or torch_sympy.FloorDiv(base, divisor)


@lru_cache(maxsize=4096)
def _quotient_of_filled(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Return the quotient of products of sizes that are filled up to multiples, as windows of pictures are; None of others."""
    if not divisor.has(*REMAINDERS) or divisor.count_ops() > _MOST_OPERATIONS:
        return None
    counts: dict[sympy.Expr, sympy.Dummy] = {}
    quotient = sympy.cancel(_in_quotients(base, counts) / _in_quotients(divisor, counts))
    if quotient.as_numer_denom()[1] != 1:
        return None
    return quotient.xreplace({count: whole for whole, count in counts.items()})


def _in_quotients(expr: sympy.Expr, counts: dict[sympy.Expr, sympy.Dummy]) -> sympy.Expr:
    """Return an expression with `m % 4` as `m - 4 q`, and `-m % 4` as `4 q - m`; `counts` gets the quotients that q stands for."""

    def without_remainder(number: sympy.Expr, step: sympy.Expr) -> sympy.Expr | None:
        if not step.is_Integer:
            return None
        constant, rest = _without_inner_remainders(number, step).as_coeff_Add()
        filled = rest.could_extract_minus_sign()
        size = -rest - constant % -step if filled else rest + constant % step
        whole = torch_sympy.FloorDiv(size + (step - 1 if filled else 0), step)
        times = step * counts.setdefault(whole, sympy.Dummy(integer=True))
        plain = _with_remainders(size, without_remainder)
        return times - plain if filled else plain - times

    return _with_remainders(expr, without_remainder)


def _without_inner_remainders(expr: sympy.Expr, step: sympy.Expr) -> sympy.Expr:
    """Return a number that has the same remainder by a divisor: `4 - m` for `4 - m % 4`."""
    return sympy.Add(
        *(
            factor * rest.args[0] if isinstance(rest, REMAINDERS) and rest.args[1] == step else factor * rest
            for factor, rest in (term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(expr)))
        )
    )


def _with_remainders(expr: sympy.Expr, replaced: Callable[[sympy.Expr, sympy.Expr], sympy.Expr | None]) -> sympy.Expr:
    """Return an expression with others for its outer remainders."""
    if isinstance(expr, REMAINDERS) and (new := replaced(*expr.args)) is not None:
        return new
    return expr if expr.is_Atom else expr.func(*(_with_remainders(each, replaced) for each in expr.args))


def without_needless_extrema(
    expr: sympy.Expr, least: Mapping[sympy.Symbol, int | sympy.Expr] | None = None
) -> sympy.Expr:
    """Return a size with `min(a, b)` as `a` wherever `a` is never larger, and `max` likewise.

    Args:
        expr: the size.
        least: the smallest value of symbols, where that is not 0: a number, or something of symbols that have none here.
    """
    above = {symbol: symbol + number for symbol, number in (least or {}).items()}
    for function, sign in _EXTREMA.items():
        if expr.has(function):
            expr = expr.replace(function, lambda *terms, f=function, s=sign: _extremum(f, terms, s, above))
    return expr


def _extremum(
    function: type, terms: tuple[sympy.Expr, ...], sign: int, above: Mapping[sympy.Symbol, sympy.Expr]
) -> sympy.Expr:
    kept = list(terms)
    for term in terms:
        differences = [sympy.expand((sign * (term - other)).subs(above)) for other in kept if other is not term]
        if any(map(never_negative, differences)):
            kept.remove(term)
    return kept[0] if len(kept) == 1 else function(*kept)


@lru_cache(maxsize=8192)
def computed(expr: sympy.Expr) -> Callable[[Mapping[sympy.Symbol, int]], Any]:
    """Return what computes an expression of sizes: sympy's own substitution takes a thousand times as long.

    Args:
        expr: of integers; a comparison too.
    """
    if not expr.free_symbols:
        value = bool(expr) if expr.is_Boolean else int(expr)
        return lambda sizes: value
    printer = PythonPrinter()
    # The printer has a name of PyTorch's for sizes taken as floats; to Python's comparisons they are equal.
    plain = expr.replace(torch_sympy.ToFloat, lambda size: size)
    code = compile(printer.doprint(plain), "size", "eval")
    names = {printer.doprint(symbol): symbol for symbol in expr.free_symbols}
    return lambda sizes: eval(code, dict(_FUNCTIONS), {name: sizes[symbol] for name, symbol in names.items()})


def is_multiple(expr: sympy.Expr, divisor: int) -> bool:
    """Say whether a sum of sizes and of their remainders by `divisor` is always a multiple of it; a quotient may be any number."""
    quotients = {part: sympy.Dummy(integer=True, nonnegative=True) for part in expr.atoms(torch_sympy.FloorDiv)}
    expr = expr.xreplace(quotients)
    symbols = sorted(expr.free_symbols, key=str)
    remainders = expr.atoms(sympy.Function)
    periodic = all(isinstance(part, REMAINDERS) and part.args[1] == divisor for part in remainders)
    if not periodic or divisor ** len(symbols) > _MAX_TRIALS:
        return False
    periods = itertools.product(range(divisor), repeat=len(symbols))
    at = computed(expr)  # as Python does: PyTorch's own `Mod` takes no number below 0, such as `(s - 1) % 4` at 0
    return all(at(dict(zip(symbols, sizes, strict=True))) % divisor == 0 for sizes in periods)


def is_zero_exactly(expr: sympy.Expr) -> bool:
    """Say whether an expression is 0 once the quotients and remainders of multiples are exact; False where that is not enough.

    So is `b n % 4 b`, and `b n - 4 (b n // 4)`, with `n = m + (-m % 4)`.
    """
    exact = expr
    if expr.has(*REMAINDERS) and sympy.expand(_in_quotients(expr, {})) == 0:
        return True
    for kind in REMAINDERS:
        exact = exact.replace(kind, lambda number, divisor, kind=kind: _remainder_of_filled(kind, number, divisor))
    exact = exact.replace(torch_sympy.FloorDiv, _exact_quotient)
    for kind in REMAINDERS:
        exact = exact.replace(kind, lambda number, divisor, kind=kind: _exact_remainder(kind, number, divisor))
    return bool(sympy.expand(exact) == 0)


def _remainder_of_filled(kind: type, number: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    is_product = bool(divisor.free_symbols)
    return (
        sympy.Integer(0) if is_product and _quotient_of_filled(number, divisor) is not None else kind(number, divisor)
    )


def _exact_quotient(number: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    return number / divisor if _is_whole(number, divisor) else torch_sympy.FloorDiv(number, divisor)


def _exact_remainder(kind: type, number: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    common = sympy.gcd(sympy.expand(number), divisor)
    left = sympy.cancel(divisor / common)
    return sympy.Integer(0) if _is_whole(sympy.cancel(number / common), left) else kind(number, divisor)


def _is_whole(number: sympy.Expr, divisor: sympy.Expr) -> bool:
    """Say whether a factor of a number is a multiple of a divisor at all sizes."""
    factors = sympy.Mul.make_args(sympy.factor_terms(number))
    return any(each == divisor or (divisor.is_Integer and is_multiple(each, int(divisor))) for each in factors)


@lru_cache(maxsize=8192)
def never_negative(expr: sympy.Expr, depth: int = 6) -> bool:
    """Say whether an expression is at least 0 whatever its sizes are; False when that cannot be proved.

    Args:
        expr: of integers.
        depth: how many extrema, divisions and remainders one after the other are bounded where several sizes are in them.
    """
    if expr.is_nonnegative is not None:
        return bool(expr.is_nonnegative)
    found = _values_of_one(expr)
    if found is not None and found.course.growth >= 0 and all(value >= 0 for value in found.values):
        return True
    if not depth or found is not None:
        return False
    expr = sympy.expand(expr)
    for term in sympy.Add.make_args(expr):
        factor, rest = term.as_coeff_Mul()
        if isinstance(rest, EXTREMA):
            branches = [expr - term + factor * inner for inner in rest.args]
            # Of the smaller of two, either may be what it is compared with; one bounds the larger of two from the safe side.
            every = isinstance(rest, SMALLER) == (factor > 0)
            return (all if every else any)(never_negative(branch, depth - 1) for branch in branches)
    least = _without_steps(expr)
    return least is not None and never_negative(least, depth - 1)


def _without_steps(expr: sympy.Expr) -> sympy.Expr | None:
    """Return what is never negative only if an expression is neither: with bounds for its quotients, or else its remainders."""
    terms = [(term, *term.as_coeff_Mul()) for term in sympy.Add.make_args(expr)]
    kinds = next(
        (each for each in (torch_sympy.FloorDiv, REMAINDERS) if any(isinstance(t[2], each) for t in terms)), ()
    )
    bounded = [_bounded(factor, rest) if isinstance(rest, kinds) else term for term, factor, rest in terms]
    if not kinds or None in bounded:
        return None
    least = sympy.expand(sympy.Add(*bounded))
    whole = sympy.ilcm(1, 1, *(number.q for number in least.atoms(sympy.Rational)))
    return sympy.expand(whole * least) + whole - 1  # an integer above -1 is none below 0


def _bounded(factor: sympy.Expr, step: sympy.Expr) -> sympy.Expr | None:
    """Return what a number times a quotient or a remainder never falls below; None where that is not by a positive number."""
    number, divisor = step.args
    if not divisor.is_Integer or divisor <= 0:
        return None
    if isinstance(step, torch_sympy.FloorDiv):
        return factor * (number - (divisor - 1 if factor > 0 else 0)) / divisor
    return sympy.Integer(0) if factor > 0 else factor * (divisor - 1)


def growth(expr: sympy.Expr) -> sympy.Rational | None:
    """Return by how much an expression of one size grows with each step of it in the long run; None where that is not known."""
    course = _course(expr) if len(expr.free_symbols) == 1 else None
    return None if course is None else course.growth / course.period


def is_zero(expr: sympy.Expr) -> bool | None:
    """Return whether an expression is 0 for all sizes, or None if that cannot be decided."""
    found = _values_of_one(expr)
    return None if found is None else found.course.growth == 0 and not any(found.values)


@dataclass(frozen=True)
class _Course:
    """How an expression goes on: from `start` on, it grows by `growth` over every `period` of its symbol."""

    period: int
    growth: sympy.Rational
    start: int = 0


@dataclass(frozen=True)
class _Values:
    """How an expression of one size goes on, and its values at all sizes before and in the first period."""

    course: _Course
    values: tuple[Any, ...]


@lru_cache(maxsize=4096)
def _values_of_one(expr: sympy.Expr) -> _Values | None:
    """Return the values of an expression that depends on one size, or on one sum of sizes; None where that is not known."""
    expr = _of_one_sum(expr)
    if len(expr.free_symbols) != 1:
        return None
    course = _course(expr)
    if course is None or course.start + course.period > _MAX_TRIALS:
        return None
    return _Values(course, tuple(_values(expr, course.start + course.period)))


def _values(expr: sympy.Expr, count: int) -> list[Any]:
    """Return the values of an expression of one size at the sizes below a number."""
    symbols = list(expr.free_symbols)
    exact = all(number.is_Integer for number in expr.atoms(sympy.Number))
    at = computed(expr) if exact else lambda sizes: expr.subs(sizes)
    return [at(dict.fromkeys(symbols, size)) for size in range(count)]


def _of_one_sum(expr: sympy.Expr) -> sympy.Expr:
    """Return an expression of `s + t` alone as one of a single size, which may be any that both may be."""
    if len(expr.free_symbols) != 2:
        return expr
    first, second = sorted(expr.free_symbols, key=str)
    total = sympy.Dummy("sum", integer=True, nonnegative=True)
    joined = sympy.expand(expr.subs(first, total - second))
    return joined if joined.free_symbols == {total} else expr


def _course(part: sympy.Basic) -> _Course | None:
    """Return how an expression goes on: sums, multiples, extrema, divisions and remainders by constants; None of anything else."""
    if part.is_Symbol:
        return _Course(1, sympy.Integer(1))
    if part.is_Integer:
        return _Course(1, sympy.Integer(0))
    if part.is_Add:
        terms = [_course(term) for term in part.args]
        known = [term for term in terms if term is not None]
        period = math.lcm(*(term.period for term in known))
        growth = sum((term.growth * (period // term.period) for term in known), sympy.Integer(0))
        return _Course(period, growth, max(term.start for term in known)) if len(known) == len(terms) else None
    if part.is_Mul and _is_scaled(part):
        factor, rest = part.as_coeff_Mul()
        inner = _course(rest) if factor.is_Rational and factor != 1 else None
        return _Course(inner.period, inner.growth * factor, inner.start) if inner is not None else None
    if isinstance(part, (torch_sympy.FloorDiv, *REMAINDERS)) and part.args[1].is_Integer:
        return _divided(part, int(part.args[1]))
    if isinstance(part, EXTREMA):
        return _smaller_in_the_end(part)
    return None


def _divided(part: sympy.Basic, divisor: int) -> _Course | None:
    inner = _course(part.args[0])
    if inner is None or not inner.growth.is_Integer:
        return None
    # As many periods as make what is divided grow by a multiple of the divisor.
    count = divisor // math.gcd(divisor, int(inner.growth))
    whole = inner.growth * count / divisor
    growth = sympy.Integer(0) if isinstance(part, REMAINDERS) else whole
    return _Course(inner.period * count, growth, inner.start)


def _smaller_in_the_end(part: sympy.Basic) -> _Course | None:
    """Return how the smaller or larger of expressions goes on: as the one that grows least, or most, once it is that one."""
    sign = _EXTREMA[type(part)]
    best, *others = part.args
    found = _course(best)
    for other in others:
        course = _course(other)
        if found is None or course is None:
            return None
        period, start = math.lcm(found.period, course.period), max(found.start, course.start)
        ahead = sign * (course.growth * (period // course.period) - found.growth * (period // found.period))
        if start + period > _MAX_TRIALS:
            return None
        if ahead == 0:  # which of the two it is repeats with them
            found = _Course(period, found.growth * (period // found.period), start)
            best = type(part)(best, other, evaluate=False)
            continue
        if ahead < 0:
            best, other, found, ahead = other, best, course, -ahead
        # `other - best`, or what is behind it, is not below 0 from here on.
        behind = min(_values(sign * (other - best), start + period)[start:])
        rounds = max(0, -(-sympy.Integer(-behind) // ahead)) if behind < 0 else 0
        found = _Course(found.period, found.growth, start + int(rounds) * period)
    return found


def _is_scaled(part: sympy.Basic) -> bool:
    return part.is_Mul and sum(1 for factor in part.args if factor.free_symbols) <= 1


# A condition on sizes that a capture was built on, and the line that asked for it.
@dataclass(frozen=True)
class Branch:
    """A condition on sizes that the code of a model asked for.

    Attributes:
        condition: over PyTorch's symbols; it was true at the example.
        source: file and line that asked.
        is_certain: the graph has the same operator the other way, and means another one: a slice from the other end.
    """

    condition: sympy.Expr
    source: str
    is_certain: bool = False

    def holds(self, sizes: Sizes) -> bool:
        """Say whether the module goes the same way at other sizes; not where the condition divides by a size that is 0."""
        try:
            return bool(computed(self.condition)(sizes))
        except ZeroDivisionError:
            return False

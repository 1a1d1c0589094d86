"""Symbolic sizes: what torch.export says with sympy, said in tract's dimension language.

In: an `int` or a sympy expression over the symbols the user named. Out: text such as `S+P` or `(T+1)/2`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import sympy

from generic_export.compat import EXTREMA, REMAINDERS, torch_sympy
from generic_export.errors import DimensionError, OptionError
from generic_export.torch_graph.sizes.pieces import in_pieces
from generic_export.torch_graph.sizes.proofs import (
    is_zero,
    never_negative,
    without_needless_extrema,
    without_symbolic_divisors,
)
from generic_export.torch_graph.sizes.ratios import ROUNDINGS, integer_quotient

Dim: TypeAlias = int | sympy.Expr
"""One size: a plain integer, or a sympy expression over named symbols (every symbol a non-negative integer)."""

Shape: TypeAlias = tuple[Dim, ...]

# docs/contributing/engine-facts.md#identifiers-and-literals: an identifier used as a value must not start with these, or tract's
# parser fails elsewhere.
_RESERVED_PREFIXES = ("true", "false", "inf")
_SYMBOL_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def dim_symbol(name: str) -> sympy.Symbol:
    """Return the sympy symbol that stands for tract's symbol `name` (a non-negative integer).

    Raises:
        OptionError: `name` is not an identifier that tract's parser accepts.
    """
    if not _SYMBOL_PATTERN.fullmatch(name) or name.startswith(_RESERVED_PREFIXES):
        raise OptionError(
            f"symbol name {name!r} cannot be parsed by tract.",
            "Use letters, digits and underscores; do not start with true, false or inf.",
        )
    return sympy.Symbol(name, integer=True, nonnegative=True)


def symbols_of(dim: Dim) -> tuple[str, ...]:
    """Return the names of the symbols of a size."""
    return () if isinstance(dim, int) else tuple(sorted(map(str, dim.free_symbols)))


def expand_dim(dim: Dim) -> Dim:
    """Return `dim` as an `int` when it is one, else as an expanded sympy expression."""
    if isinstance(dim, int):
        return dim
    expanded = sympy.expand(dim)
    return int(expanded) if expanded.is_Integer else expanded


def simplify_dim(dim: Dim) -> Dim:
    """Return `dim` expanded, with as few extrema as is known."""
    expanded = expand_dim(dim)
    if isinstance(expanded, int) or not expanded.has(*EXTREMA):
        return expanded
    return expand_dim(without_needless_extrema(in_pieces(expanded)))


def floor_div(dividend: Dim, divisor: int) -> Dim:
    """Return `dividend // divisor` as PyTorch writes it, so that it compares equal to its own sizes."""
    if isinstance(dividend, int):
        return dividend // divisor
    return simplify_dim(torch_sympy.FloorDiv(sympy.expand(dividend), divisor))


def whole_size(count: sympy.Expr) -> tuple[sympy.Expr, int]:
    """Return S and 8 for S//8; a size that is no such count, and 1."""
    if isinstance(count, torch_sympy.FloorDiv) and count.args[0].is_Symbol and count.args[1].is_Integer:
        return count.args[0], int(count.args[1])
    return count, 1


def plain_size(expr: sympy.Expr, least: Mapping[sympy.Symbol, int] | None = None) -> sympy.Expr:
    """Return a size as torch.export wrote it, in sums, products and integer divisions wherever that is possible.

    `least` is the smallest value of symbols, where that is not 0.
    """
    return without_needless_extrema(in_pieces(without_symbolic_divisors(_without_floats(expr))), least)


def _without_floats(expr: sympy.Expr) -> sympy.Expr:
    """Return a size that PyTorch computes with floats as an integer division.

    `trunc(1.5 * float(s))` becomes `(3*s) // 2`, and `ceil(s / 2)` becomes `(s + 1) // 2`.
    """
    if not expr.has(torch_sympy.ToFloat, torch_sympy.IntTrueDiv):
        return expr
    for function in ROUNDINGS:
        expr = expr.replace(function, lambda inner, f=function: integer_quotient(f, inner) or f(inner))
    return expr


def smaller_dim(left: Dim, right: Dim) -> Dim:
    """Return the smaller of two sizes; the one that is never larger when that is known, else `min(left, right)`."""
    difference = sympy.expand(sympy.sympify(right) - sympy.sympify(left))
    if never_negative(difference):
        return left
    if never_negative(-difference):
        return right
    return simplify_dim(torch_sympy.Min(sympy.sympify(left), sympy.sympify(right)))


def same_dim(left: Dim, right: Dim) -> bool:
    """Say whether two sizes are equal for every value of their symbols."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return left is right or _same_expressions(sympy.sympify(left), sympy.sympify(right))


@lru_cache(maxsize=4096)
def _same_expressions(left: sympy.Expr, right: sympy.Expr) -> bool:
    if left == right:
        return True
    difference = sympy.expand(left - right)
    if difference.is_number:
        return bool(difference == 0)
    # One size at which they differ settles it; sympy.simplify takes milliseconds.
    symbols = sorted(difference.free_symbols, key=str)
    trials = [dict(zip(symbols, sizes, strict=False)) for sizes in _TRIAL_SIZES if len(symbols) <= len(sizes)]
    if any(difference.subs(sizes) != 0 for sizes in trials):
        return False
    proved = is_zero(difference)
    if proved is not None:
        return proved
    difference = sympy.expand(in_pieces(difference))
    if difference.has(torch_sympy.FloorDiv):
        difference = sympy.expand(difference.replace(torch_sympy.FloorDiv, _reduced_floor_div))
    return bool(difference == 0) or bool(sympy.simplify(difference) == 0)


# A size for each symbol, in their alphabetical order.
_TRIAL_SIZES = ((101, 67, 43, 29, 19, 11), (240, 360, 120, 720, 840, 60))


def _reduced_floor_div(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """Return the quotient with a constant below the divisor: (s - 3) // 2 and (s - 1) // 2 - 1 become one form."""
    constant, rest = sympy.expand(base).as_coeff_Add()
    if not (divisor.is_Integer and constant.is_Integer):
        return torch_sympy.FloorDiv(base, divisor)
    return torch_sympy.FloorDiv(rest + constant % divisor, divisor) + constant // divisor


def same_shape(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Say whether two shapes are equal for every value of their symbols."""
    return len(left) == len(right) and all(same_dim(a, b) for a, b in zip(left, right, strict=True))


def evaluate_dim(dim: Dim, values: Mapping[str, int]) -> int:
    """Return the number `dim` stands for once each symbol has the value given.

    Raises:
        DimensionError: a symbol of `dim` has no value, or `dim` divides by a size that is 0.
    """
    if isinstance(dim, int):
        return dim
    try:
        result = dim.subs({dim_symbol(name): value for name, value in values.items()})
    except ZeroDivisionError:
        raise DimensionError(f"size {dim} divides by zero at {dict(values)}.", symbols=symbols_of(dim)) from None
    if not result.is_Integer:
        raise DimensionError(
            f"size {dim_text(dim)} cannot be computed from {dict(values)}: a symbol has no value.",
            symbols=symbols_of(dim),
        )
    return int(result)


def dim_text(dim: Dim) -> str:
    """Return `dim` in tract's dimension language (docs/contributing/engine-facts.md#symbols-and-sizes).

    Raises:
        DimensionError: the expression uses a function that tract has no form for.
    """
    written = as_written(dim)
    return str(written) if isinstance(written, int) else _print(written)


def as_written(dim: Dim) -> Dim:
    """Return an equal size in the form that `dim_text` writes, which tract's truncating division evaluates correctly."""
    expanded = expand_dim(dim)
    return expanded if isinstance(expanded, int) else expand_dim(_without_negative_dividends(expanded))


def _print(expr: sympy.Expr) -> str:
    if isinstance(expr, sympy.Integer):
        return str(int(expr))
    if isinstance(expr, sympy.Symbol):
        return str(expr.name)
    printer = _PRINTERS.get(type(expr))
    if printer is None:
        raise DimensionError(
            f"size {expr} has no form in tract's dimension language ({type(expr).__name__} is not supported).",
            "Declare that axis static, or compute the size from sums, products and integer divisions.",
            symbols=symbols_of(expr),
        )
    return printer(expr)


def _print_add(expr: sympy.Expr) -> str:
    text = ""
    # Symbols first, the constant last: `S+P-1`, as a person writes it.
    for term in sorted(expr.args, key=lambda arg: (arg.is_number, arg.could_extract_minus_sign(), str(arg))):
        if term.could_extract_minus_sign() and text:
            text += f"-{_as_factor(-term)}"
        else:
            text += f"+{_print(term)}" if text else _print(term)
    return text


def _print_mul(expr: sympy.Expr) -> str:
    numerator, denominator = expr.as_numer_denom()
    if denominator != 1:
        # An exact division: torch only writes it where the remainder is known to be zero.
        return f"{_as_factor(numerator)}/{_as_factor(denominator)}"
    coefficient, rest = expr.as_coeff_Mul()
    if coefficient == -1:
        return f"-1*{_as_factor(rest)}"
    return "*".join(_as_factor(factor) for factor in expr.args)


def _print_pow(expr: sympy.Expr) -> str:
    base, exponent = expr.args
    if not (exponent.is_Integer and int(exponent) > 0):
        raise DimensionError(
            f"size {expr} has no form in tract's dimension language (exponent {exponent}).", symbols=symbols_of(expr)
        )
    return "*".join([_as_factor(base)] * int(exponent))


def _print_floor_div(expr: sympy.Expr) -> str:
    base, divisor = expr.args
    return _quotient_text(base, _constant(divisor, expr))


def _quotient_text(base: sympy.Expr, divisor: int) -> str:
    """Return the text of a quotient; of `(8*s + 6) // 7` that of `(16*s + 13) // 14`, which is the same number.

    tract makes `2*(4*s + 3)` of such a sum in one place and not in another, and finds the two quotients unlike.
    """
    constant, rest = base.as_coeff_Add()
    numbers = [term.as_coeff_Mul()[0] for term in sympy.Add.make_args(rest)]
    is_whole = constant != 0 and all(number.is_Integer for number in (constant, *numbers))
    if is_whole and math.gcd(int(constant), *map(int, numbers)) > 1:
        base, divisor = sympy.expand(2 * base) + 1, 2 * divisor
    return f"{_as_factor(base)}/{divisor}"


def _without_negative_dividends(expr: sympy.Expr) -> sympy.Expr:
    """Return a size in which no quotient is of less than nothing: tract's division truncates, Python's rounds down.

    `(1 - s) // 2` becomes `-(s // 2)`, and `(t - s) // 2` becomes `(t + s) // 2 - s`. All terms become one sum: of
    `(a / n - s) + b` tract makes `(a - n*s) / n + b`, and truncates that. A number that is subtracted stays: sizes below it
    have no use for the quotient.
    """
    if not expr.has(torch_sympy.FloorDiv):
        return expr
    replaced = expr.replace(torch_sympy.FloorDiv, _of_no_negative)
    return _in_each_sum(expr if replaced == expr else sympy.expand(replaced))


def _in_each_sum(expr: sympy.Expr) -> sympy.Expr:
    """Return a size without subtracted quotients, also in what it divides and compares."""
    if not expr.has(torch_sympy.FloorDiv):
        return expr
    args = [_in_each_sum(arg) for arg in expr.args]
    same = all(new is old for new, old in zip(args, expr.args, strict=True))
    return _without_subtracted_quotients(expr if same else expr.func(*args))


def _without_subtracted_quotients(expr: sympy.Expr) -> sympy.Expr:
    """Return `s - s // 2` as `(s + 1) // 2`, and `s // 2 - s` as `-((s + 1) // 2)`.

    tract puts the sum into the quotient, and truncates what is below 0 then.
    """
    for term in expr.args if expr.is_Add else ():
        factor, quotient = term.as_coeff_Mul()
        if not (factor.is_Integer and isinstance(quotient, torch_sympy.FloorDiv) and quotient.args[1].is_Integer):
            continue
        base, divisor = quotient.args
        plain = _multiples(expr, -factor)
        dividend = sympy.expand(divisor * plain - base + divisor - 1)
        if plain.free_symbols & base.free_symbols and _subtracted(dividend) == 0:
            joined = torch_sympy.FloorDiv(dividend, divisor, evaluate=False)
            return _without_subtracted_quotients(sympy.expand(expr - term + factor * plain) - factor * joined)
    return expr


def _multiples(total: sympy.Expr, factor: sympy.Expr) -> sympy.Expr:
    """Return what a sum has `factor` times, or a multiple of it, of symbols and their products."""
    terms = (term.as_coeff_Mul() for term in total.args if not term.is_number and not term.atoms(sympy.Function))
    return sympy.Add(*(count // factor * rest for count, rest in terms if count * factor > 0))


def _of_no_negative(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    quotient, base = torch_sympy.FloorDiv(base, divisor), sympy.expand(base)
    subtracted = _subtracted(base)
    if subtracted == 0 or not divisor.is_Integer:
        return quotient
    constant, rest = base.as_coeff_Add()
    if rest == -subtracted and constant.is_Integer:  # nothing is added
        above = subtracted - constant % divisor + divisor - 1
        return constant // divisor - torch_sympy.FloorDiv(above, divisor)
    return torch_sympy.FloorDiv(sympy.expand(base + divisor * subtracted), divisor, evaluate=False) - subtracted


def _subtracted(base: sympy.Expr) -> sympy.Expr:
    """Return the sizes that a dividend subtracts; 0 where it is known not to fall below 0, a negative number aside."""
    terms = sympy.Add.make_args(sympy.expand(base))
    subtracted = sympy.Add(*(-term for term in terms if term.free_symbols and term.could_extract_minus_sign()))
    return sympy.Integer(0) if subtracted == 0 or never_negative(base) else subtracted


def _print_mod(expr: sympy.Expr) -> str:
    base, divisor = expr.args
    number = _constant(divisor, expr)
    # A term of a remainder that is one by the same divisor is what it is the remainder of: (4 - s % 4) % 4 == -s % 4.
    base = sympy.expand(sympy.Add(*(_without_remainder(term, divisor) for term in sympy.Add.make_args(base))))
    constant, rest = base.as_coeff_Add()
    base = rest + constant % divisor
    subtracted = _subtracted(base)
    if subtracted != 0 and rest == -subtracted:  # nothing is added
        # tract's division truncates: -5 % 4 is written ((5+3)/4)*4 - 5.
        return f"({_quotient_text(number - 1 - base, number)})*{number}-{_as_factor(-base)}"
    base = sympy.expand(base + number * subtracted)
    return f"{_as_factor(base)}-({_quotient_text(base, number)})*{number}"


def _without_remainder(term: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    coefficient, factor = term.as_coeff_Mul()
    same = isinstance(factor, REMAINDERS) and factor.args[1] == divisor and coefficient.is_Integer
    return coefficient * factor.args[0] if same else term


def _print_ceiling(expr: sympy.Expr) -> str:
    (ratio,) = expr.args
    numerator, denominator = ratio.as_numer_denom()
    return _quotient_text(sympy.expand(numerator + denominator - 1), _constant(denominator, expr))


def _constant(divisor: sympy.Expr, expr: sympy.Expr) -> int:
    if not divisor.is_Integer:
        raise DimensionError(
            f"size {expr} divides by {divisor}: tract divides sizes by constants only.", symbols=symbols_of(expr)
        )
    return int(divisor)


def _print_extremum(name: str) -> Callable[[sympy.Expr], str]:
    def printer(expr: sympy.Expr) -> str:
        terms = sorted(expr.args, key=lambda arg: (arg.is_number, str(arg)))
        text = _print(terms[0])
        for term in terms[1:]:
            text = f"{name}({text}, {_print(term)})"
        return text

    return printer


def _as_factor(expr: sympy.Expr) -> str:
    text = _print(expr)
    is_atom = isinstance(expr, sympy.Symbol) or (isinstance(expr, sympy.Integer) and int(expr) >= 0)
    return text if is_atom or isinstance(expr, (sympy.Max, sympy.Min)) else f"({text})"


_PRINTERS: dict[type, Callable[[sympy.Expr], str]] = {
    sympy.Add: _print_add,
    sympy.Mul: _print_mul,
    sympy.Pow: _print_pow,
    sympy.Mod: _print_mod,
    sympy.ceiling: _print_ceiling,
    sympy.Max: _print_extremum("max"),
    sympy.Min: _print_extremum("min"),
    torch_sympy.FloorDiv: _print_floor_div,
    torch_sympy.CleanDiv: _print_floor_div,
    torch_sympy.Mod: _print_mod,
    torch_sympy.PythonMod: _print_mod,
    torch_sympy.Max: _print_extremum("max"),
    torch_sympy.Min: _print_extremum("min"),
}

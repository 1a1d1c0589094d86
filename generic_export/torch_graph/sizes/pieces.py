"""One form for sizes that take the smaller or larger of one size and numbers, however they are nested.

In: a sympy expression such as `n - max(n - 6, 0)`, or `n - 2 - min(min(n, 8) - 2, 1)`. Out: the same size by the pieces of its
graph, `min(6, n)` and `min(max(n - 3, 0), 5)`. tract takes hours over sums of nested extrema, and does not see that two forms
of a size are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import pairwise

import sympy

from generic_export.compat import EXTREMA, SMALLER, torch_sympy
from generic_export.torch_graph.sizes.proofs import never_negative

_EVERYWHERE = -math.inf


@dataclass(frozen=True)
class _Piece:
    """From `start` on, up to the next piece, the size is `slope * n + constant`."""

    start: float | Fraction
    slope: int
    constant: int

    @property
    def course(self) -> tuple[int, int]:
        return self.slope, self.constant

    def line(self, n: sympy.Expr) -> sympy.Expr:
        return sympy.expand(self.slope * n + self.constant)


def in_pieces(expr: sympy.Expr) -> sympy.Expr:
    """Return a size with each sum of extrema of one size and numbers in one form; others stay as they are."""
    if not expr.has(*EXTREMA):
        return expr
    if isinstance(expr, EXTREMA) or expr.is_Add or expr.is_Mul:
        inner = _inner_size(expr)
        pieces = None if inner is None else _pieces(expr, inner)
        if inner is not None and pieces is not None:
            return _written([piece for piece, end in _with_ends(pieces) if end > 0 or not never_negative(inner)], inner)
    return expr.func(*(in_pieces(part) for part in expr.args))


def _inner_size(expr: sympy.Expr) -> sympy.Expr | None:
    """Return what every extremum in a sum compares with numbers; None where they compare several."""
    found = {size for extremum in expr.atoms(*EXTREMA) for size in map(_without_numbers, extremum.args) if size != 0}
    return found.pop() if len(found) == 1 else None


def _without_numbers(term: sympy.Expr) -> sympy.Expr:
    """Return the size that a term has beside a constant, a factor and extrema, which have their own."""
    return sympy.Add(
        *(part for part in sympy.Add.make_args(term.as_coeff_Add()[1]) if not part.has(*EXTREMA))
    ).primitive()[1]


def _pieces(expr: sympy.Expr, n: sympy.Expr) -> list[_Piece] | None:
    """Return the pieces of a size as one of `n`; None where it is none."""
    if isinstance(expr, EXTREMA):
        sign = 1 if isinstance(expr, SMALLER) else -1
        first, *others = (_pieces(part, n) for part in expr.args)
        for other in others:
            first = None if first is None or other is None else _lowest(first, other, sign)
        return first
    with_extrema = [term for term in sympy.Add.make_args(expr) if term.has(*EXTREMA)]
    rest = sympy.expand(expr - sympy.Add(*with_extrema))
    slope = _slope(rest, n)
    if slope is None:
        return None
    total = [_Piece(_EVERYWHERE, slope, int(sympy.expand(rest - slope * n)))]
    for term in with_extrema:
        factor, extremum = term.as_coeff_Mul()
        inner = _pieces(extremum, n) if isinstance(extremum, EXTREMA) and factor.is_Integer else None
        if inner is None:
            return None
        total = [
            _Piece(start, one.slope + int(factor) * other.slope, one.constant + int(factor) * other.constant)
            for start, one, other in _side_by_side(total, inner)
        ]
    return _joined(total)


def _slope(expr: sympy.Expr, n: sympy.Expr) -> int | None:
    term, *_ = sympy.Add.make_args(n)
    own, factor = term.as_coeff_Mul()[1], term.as_coeff_Mul()[0]
    slope = sympy.expand(expr).coeff(own) / factor
    return int(slope) if slope.is_Integer and sympy.expand(expr - slope * n).is_Integer else None


def _side_by_side(one: Sequence[_Piece], other: Sequence[_Piece]) -> list[tuple[float | Fraction, _Piece, _Piece]]:
    """Return where one of two sizes has a piece that begins, and the pieces of both from there."""
    starts = sorted({piece.start for piece in (*one, *other)})
    return [(start, _at(start, one), _at(start, other)) for start in starts]


def _at(start: float | Fraction, pieces: Sequence[_Piece]) -> _Piece:
    return max((piece for piece in pieces if piece.start <= start), key=lambda piece: piece.start)


def _lowest(one: Sequence[_Piece], other: Sequence[_Piece], sign: int) -> list[_Piece]:
    """Return the smaller of two sizes; the larger where `sign` is -1."""
    found: list[_Piece] = []
    both = _side_by_side(one, other)
    for (start, left, right), end in zip(both, [*(start for start, _, _ in both[1:]), math.inf], strict=True):
        steeper, flatter = sorted((left, right), key=lambda piece: sign * piece.slope, reverse=True)
        if steeper.slope == flatter.slope:
            lower = min((left, right), key=lambda piece: sign * piece.constant)
            found.append(_Piece(start, lower.slope, lower.constant))
            continue
        meeting = Fraction(flatter.constant - steeper.constant, steeper.slope - flatter.slope)
        if start < meeting:
            found.append(_Piece(start, steeper.slope, steeper.constant))
        if meeting < end:
            found.append(_Piece(max(start, meeting), flatter.slope, flatter.constant))
    return _joined(found)


def _with_ends(pieces: Sequence[_Piece]) -> list[tuple[_Piece, float | Fraction]]:
    return list(zip(pieces, [*(piece.start for piece in pieces[1:]), math.inf], strict=True))


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Return the pieces that have a length, each once."""
    found: list[_Piece] = []
    for piece, end in _with_ends(pieces):
        if piece.start < end and (not found or found[-1].course != piece.course):
            found.append(piece)
    return found


def _written(pieces: Sequence[_Piece], n: sympy.Expr) -> sympy.Expr:
    """Return a size from its pieces, with constants outside of extrema: tract adds sizes, and compares how they are written."""
    first, *later = pieces
    if len(pieces) == 2:
        return _bent(first, later[0], n)
    if len(pieces) == 3 and first.slope == later[1].slope:
        ramp = later[0].slope - first.slope
        width = later[1].start - later[0].start
        risen = torch_sympy.Min(_beyond(later[0], n, abs(ramp)), sympy.Rational(abs(ramp) * width))
        return first.line(n) + (_factored(risen) if ramp > 0 else -_factored(risen))
    whole = first.line(n)
    for before, piece in pairwise(pieces):
        bend = piece.slope - before.slope
        beyond = _factored(_beyond(piece, n, abs(bend)))
        whole += beyond if bend > 0 else -beyond
    return whole


def _bent(first: _Piece, second: _Piece, n: sympy.Expr) -> sympy.Expr:
    """Return a size of two pieces, as `max(0, n - 6) + c` or `min(n, 6) + c`."""
    flat, steep = sorted((first, second), key=lambda piece: (abs(piece.slope), -piece.slope))
    slope = steep.slope - flat.slope
    if slope < 0 or first.slope < second.slope:
        sign = 1 if first.slope < second.slope else -1
        return flat.line(n) + sign * _factored(torch_sympy.Max(0, sympy.expand(sign * (steep.line(n) - flat.line(n)))))
    bent = torch_sympy.Min(sympy.expand(slope * n), flat.constant - steep.constant)
    return sympy.expand(flat.slope * n + steep.constant) + _factored(bent)


def _beyond(piece: _Piece, n: sympy.Expr, slope: int) -> sympy.Expr:
    return torch_sympy.Max(0, sympy.expand(slope * (n - sympy.Rational(piece.start))))


def _factored(extremum: sympy.Expr) -> sympy.Expr:
    """Return an extremum with the factor that all it compares have before it: `4 min(n, 6)` for `min(4 n, 24)`."""
    if isinstance(extremum, EXTREMA):
        parts = [_factored(part) for part in extremum.args]
        factor = reduce(sympy.gcd, (part.primitive()[0] for part in parts if part != 0))
        if factor != 1:
            return factor * extremum.func(*(sympy.expand(part / factor) for part in parts))
    return extremum


__all__ = ["in_pieces"]

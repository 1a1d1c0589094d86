"""Symbolic sizes are printed in tract's language and mean the same there."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from generic_export.errors import DimensionError, OptionError
from generic_export.torch_graph.dims import (
    dim_symbol,
    dim_text,
    evaluate_dim,
    plain_size,
    same_dim,
    same_shape,
    simplify_dim,
)
from generic_export.torch_graph.sizes.proofs import never_negative

S, P = dim_symbol("S"), dim_symbol("P")


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (7, "7"),
        (S, "S"),
        (S + P, "P+S"),
        (S - 1, "S-1"),
        (2 * S, "2*S"),
        (S * S, "S*S"),
        (-S, "-1*S"),
        (P - S, "P-S"),
        (FloorDiv(S + 1, 2), "(S+1)/2"),
        (2 * FloorDiv(S, 2), "2*(S/2)"),
        (Mod(S, 4), "S-(S/4)*4"),
        (sympy.Max(S, 3), "max(S, 3)"),
        (sympy.Min(S + P, 3), "min(P+S, 3)"),
        (S / 2, "S/2"),
        ((S + 1) * (P + 2), "2*S+P+P*S+2"),
        (FloorDiv(1 - S, 2), "-1*(S/2)"),
        (FloorDiv(S + 1, 2) + FloorDiv(1 - S, 2), "(S+1)/2-(S/2)"),
        (FloorDiv(P - S, 2) + S, "(P+S)/2"),
    ],
)
def test_dimension_text(dim: sympy.Expr | int, text: str) -> None:
    assert dim_text(dim) == text


def evaluate_text(text: str, s: int, p: int) -> int:
    """Evaluate tract's dimension text as tract does: integer division truncates, which is flooring here."""
    return int(eval(text.replace("/", "//"), {"S": s, "P": p, "max": max, "min": min}))


expressions = st.recursive(
    st.one_of(st.just(S), st.just(P), st.integers(0, 9).map(sympy.Integer)),
    lambda children: st.one_of(
        st.tuples(children, children).map(lambda pair: pair[0] + pair[1]),
        st.tuples(children, children).map(lambda pair: pair[0] * pair[1]),
        st.tuples(children, st.integers(1, 5)).map(lambda pair: FloorDiv(pair[0], pair[1])),
        st.tuples(children, st.integers(2, 5)).map(lambda pair: Mod(pair[0], pair[1])),
        st.tuples(children, children).map(lambda pair: sympy.Max(*pair)),
        st.tuples(children, children).map(lambda pair: sympy.Min(*pair)),
    ),
    max_leaves=6,
)


@settings(deadline=None)  # sympy's first call takes its time
@given(expressions, st.integers(0, 40), st.integers(0, 40))
@example(sympy.Max(S + 1, Mod(P, 2)), 1, 1)
def test_text_has_the_value_of_the_expression(expr: sympy.Expr, s: int, p: int) -> None:
    assert evaluate_text(dim_text(expr), s, p) == evaluate_dim(simplify_dim(expr), {"S": s, "P": p})


class _Truncating(int):
    """A number that is divided as tract divides: towards zero."""

    def __floordiv__(self, other: int) -> _Truncating:
        return _Truncating(math.trunc(Fraction(int(self), int(other))))

    def __add__(self, other: int) -> _Truncating:
        return _Truncating(int(self) + int(other))

    def __sub__(self, other: int) -> _Truncating:
        return _Truncating(int(self) - int(other))

    def __mul__(self, other: int) -> _Truncating:
        return _Truncating(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: int) -> _Truncating:
        return _Truncating(int(other) - int(self))


def _truncated(text: str, s: int, p: int) -> int:
    names = {"S": _Truncating(s), "P": _Truncating(p), "max": max, "min": min}
    return int(eval(text.replace("/", "//"), names))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(-3, 3),
    st.integers(-3, 3),
    st.integers(0, 9),
    st.integers(2, 5),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_a_quotient_of_less_than_nothing_is_rounded_down(
    of_s: int, of_p: int, constant: int, divisor: int, s: int, p: int
) -> None:
    expr = FloorDiv(of_s * S + of_p * P + constant, divisor) + 3 * S + 3 * P
    assert _truncated(dim_text(expr), s, p) == (of_s * s + of_p * p + constant) // divisor + 3 * (s + p)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 9), st.integers(2, 5), st.integers(0, 40), st.integers(0, 40)
)
def test_a_remainder_of_less_than_nothing_is_positive(
    of_s: int, of_p: int, constant: int, divisor: int, s: int, p: int
) -> None:
    expr = PythonMod(of_s * S + of_p * P + constant, divisor)
    assert _truncated(dim_text(expr), s, p) == (of_s * s + of_p * p + constant) % divisor


def test_a_remainder_inside_a_quotient_stays() -> None:
    expr = Mod(FloorDiv(Mod(S, 2), 2) + Mod(S, 2), 2)
    assert [evaluate_text(dim_text(expr), s, 0) for s in range(6)] == [0, 1, 0, 1, 0, 1]
    assert evaluate_text(dim_text(Mod(FloorDiv(Mod(S, 2), 2), 2)), 2, 0) == 0


def test_equality_is_for_every_value_of_the_symbols() -> None:
    assert same_dim((S + 1) * 2, 2 * S + 2)
    assert not same_dim(S, P)
    assert same_shape([1, S], [1, S + 0])
    assert not same_shape([1, S], [S])


def test_a_size_without_tract_form_is_an_error_that_says_so() -> None:
    with pytest.raises(DimensionError, match="no form"):
        dim_text(sympy.sqrt(S))
    with pytest.raises(DimensionError, match="divides by"):
        dim_text(FloorDiv(S, P))


@pytest.mark.parametrize("name", ["", "1S", "a.b", "info", "true_size", "falsey"])
def test_symbol_names_that_break_tracts_parser_are_refused(name: str) -> None:
    with pytest.raises(OptionError):
        dim_symbol(name)


def test_a_missing_symbol_value_is_named() -> None:
    with pytest.raises(DimensionError, match="no value"):
        evaluate_dim(S + P, {"S": 3})


def test_a_quotient_is_subtracted_nowhere_in_a_size() -> None:
    rest = S - FloorDiv(S, 2)
    assert dim_text(rest) == "(S+1)/2"
    assert dim_text(2 * FloorDiv(rest, 2)) == "2*((S+1)/4)"
    assert dim_text(2 * rest - 2) == "2*((S+1)/2)-2"
    assert dim_text(FloorDiv(S, 2) - S) == "-1*((S+1)/2)"
    assert dim_text(Min(rest, P)) == "min((S+1)/2, P)"


def test_extrema_that_one_period_decides_are_gone() -> None:
    height = dim_symbol("H")
    quarter, doubled_eighth = FloorDiv(height + 3, 4), 2 * FloorDiv(height + 7, 8)
    assert plain_size(Min(doubled_eighth, quarter)) == quarter
    assert plain_size(Max(doubled_eighth, quarter)) == doubled_eighth
    assert plain_size(Min(height, 4)) == Min(height, 4)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(-5, 5),
)
def test_what_is_called_never_negative_never_is(terms: list[tuple[int, int, int]], constant: int) -> None:
    size = dim_symbol("S")
    expr = sum((factor * FloorDiv(size + shift, divisor) for factor, shift, divisor in terms), sympy.Integer(constant))
    values = (
        constant + sum(f * ((number + shift) // divisor) for f, shift, divisor in terms) for number in range(7000)
    )
    assert never_negative(sympy.expand(expr)) == all(value >= 0 for value in values)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 9), st.integers(-4, 4))
def test_nested_divisions_start_over_where_they_are_said_to(inner: int, outer: int, shift: int, constant: int) -> None:
    size = dim_symbol("S")
    padded = inner * FloorDiv(size + shift, inner)
    expr = sympy.expand(outer * FloorDiv(padded + 1, outer) - size + constant)
    values = (outer * ((inner * ((n + shift) // inner) + 1) // outer) - n + constant for n in range(4 * inner * outer))
    assert never_negative(expr) == all(value >= 0 for value in values)


def test_a_length_padded_to_blocks_is_as_long_as_itself_after_the_cut() -> None:
    size = dim_symbol("S")
    padded = size + PythonMod(-size, 128)
    assert plain_size(Min(128 * FloorDiv(padded, 128), size)) == size


def test_a_size_that_divides_by_nothing_is_no_size() -> None:
    shared = FloorDiv(dim_symbol("T"), dim_symbol("U"))
    assert evaluate_dim(shared, {"T": 9, "U": 2}) == 4
    with pytest.raises(DimensionError, match="divides by zero") as error:
        evaluate_dim(shared, {"T": 9, "U": 0})
    assert set(error.value.symbols) == {"T", "U"}

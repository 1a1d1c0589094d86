"""Roundings of sizes that Python computes with floats are the same numbers as divisions of integers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction

import pytest
import sympy
from hypothesis import event, given, settings
from hypothesis import strategies as st

from generic_export.compat import torch_sympy
from generic_export.torch_graph.sizes.ratios import CHECKED, integer_quotient

PYTHON: dict[type, Callable[[float], int]] = {
    torch_sympy.TruncToInt: math.trunc,
    torch_sympy.FloorToInt: math.floor,
    torch_sympy.CeilToInt: math.ceil,
    torch_sympy.RoundToInt: round,
}
T = sympy.Symbol("T", integer=True, nonnegative=True)
FACTORS = st.one_of(
    st.floats(0.01, 100.0, allow_nan=False),
    st.fractions(Fraction(1, 97), 100, max_denominator=97).map(float),
    st.floats(0.99, 1.01),
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(PYTHON)), FACTORS, st.booleans(), st.lists(st.integers(0, CHECKED), min_size=20, max_size=20)
)
def test_what_python_says(rounding: type, factor: float, divides: bool, sizes: list[int]) -> None:
    size = torch_sympy.ToFloat(T)
    inner = torch_sympy.FloatTrueDiv(size, sympy.Float(factor)) if divides else sympy.Float(factor) * size
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = integer_quotient(rounding, inner)
    if found is None or told:
        event("no fraction" if found is None else "told of a difference")
        return
    for each in sizes:
        wanted = PYTHON[rounding](each / factor if divides else each * factor)
        assert found.subs(T, each) == wanted, (found, each)


@pytest.mark.parametrize("factor", [0.7937005259840998, 1.2599210498948732, math.pi, 1 / 3, 0.9999999])
@pytest.mark.parametrize("rounding", [torch_sympy.FloorToInt, torch_sympy.CeilToInt, torch_sympy.RoundToInt])
def test_numbers_that_are_no_simple_fractions(factor: float, rounding: type) -> None:
    found = integer_quotient(rounding, torch_sympy.FloatTrueDiv(torch_sympy.ToFloat(T), sympy.Float(factor)))
    assert found is not None
    for each in (1, 2, 7, 1000, 44100, CHECKED - 1, CHECKED):
        assert found.subs(T, each) == PYTHON[rounding](each / factor)


def test_quotients_of_whole_numbers_stay_simple() -> None:
    found = integer_quotient(torch_sympy.CeilToInt, torch_sympy.FloatTrueDiv(torch_sympy.ToFloat(T), sympy.Float(1.2)))
    assert found == torch_sympy.FloorDiv(5 * T + 5, 6)


def test_halves_to_even_have_no_fraction() -> None:
    assert integer_quotient(torch_sympy.RoundToInt, sympy.Float(0.5) * torch_sympy.ToFloat(T)) is None


def test_where_python_follows_no_fraction_that_is_told() -> None:
    with pytest.warns(UserWarning, match="7/10.* at 90 "):
        found = integer_quotient(torch_sympy.TruncToInt, sympy.Float(0.7) * torch_sympy.ToFloat(T))
    assert found == torch_sympy.FloorDiv(7 * T, 10) and int(90 * 0.7) == 62


def test_sums_of_real_numbers_have_none() -> None:
    assert integer_quotient(torch_sympy.FloorToInt, torch_sympy.ToFloat(T) + sympy.Float(0.5)) is None

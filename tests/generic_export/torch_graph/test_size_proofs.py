"""What is proved of sizes, against trying them; and sizes that tract has to be told in another form."""

from __future__ import annotations

import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.compat import torch_sympy
from generic_export.torch_graph.dims import dim_symbol, dim_text, same_dim
from generic_export.torch_graph.sizes.proofs import computed, is_multiple, is_zero, never_negative

LENGTH, OTHER = dim_symbol("T"), dim_symbol("U")
FARTHEST = 1500

Floor, Smaller, Larger = torch_sympy.FloorDiv, torch_sympy.Min, torch_sympy.Max


def _sizes(symbols: list[sympy.Symbol]) -> st.SearchStrategy[sympy.Expr]:
    return st.recursive(
        st.one_of(st.sampled_from(symbols), st.integers(-9, 9).map(sympy.Integer)),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] - pair[1]),
            st.tuples(inner, st.integers(-2, 3)).map(lambda pair: pair[0] * pair[1]),
            st.tuples(inner, st.integers(2, 5)).map(lambda pair: Floor(*pair)),
            st.tuples(inner, st.integers(2, 5)).map(lambda pair: torch_sympy.PythonMod(*pair)),
            st.tuples(inner, inner).map(lambda pair: Smaller(*pair)),
            st.tuples(inner, inner).map(lambda pair: Larger(*pair)),
        ),
        max_leaves=6,
    )


@settings(max_examples=200, deadline=None)
@given(_sizes([LENGTH]))
def test_what_is_proved_holds_at_every_size(size: sympy.Expr) -> None:
    size = sympy.expand(size)
    if not size.free_symbols:
        return
    values = [computed(size)({LENGTH: length}) for length in range(FARTHEST)]
    assert min(values) >= 0 or not never_negative(size)
    assert is_zero(size) in (None, not any(values))


@settings(max_examples=200, deadline=None)
@given(_sizes([LENGTH, OTHER]))
def test_what_is_proved_of_two_sizes_holds_at_every_pair(size: sympy.Expr) -> None:
    size = sympy.expand(size)
    if size.free_symbols == {LENGTH, OTHER} and never_negative(size):
        at = computed(size)
        assert all(at({LENGTH: length, OTHER: other}) >= 0 for length in range(40) for other in range(40))


def test_what_is_filled_up_to_a_multiple_is_never_less_than_half_of_it() -> None:
    joined = LENGTH + OTHER - Larger(LENGTH - 6, 0)  # the last six, and all of another
    filled = joined + torch_sympy.PythonMod(-joined, 6)
    assert never_negative(filled)
    assert never_negative(filled - Floor(filled, 2))
    assert not never_negative(filled - Floor(filled, 2) - 1)


def test_multiples_are_found_where_a_remainder_is_of_less_than_nothing() -> None:
    below = LENGTH - 1
    assert is_multiple(below - torch_sympy.Mod(below, 4), 4)
    assert not is_multiple(below + torch_sympy.Mod(below, 4), 4)


def test_equal_sizes_are_known_to_be_equal() -> None:
    left = LENGTH - Smaller(LENGTH, 5)
    assert same_dim(left - Smaller(left, 1), Larger(left - 1, 0))
    assert same_dim(LENGTH - Larger(LENGTH - 6, 0), Smaller(LENGTH - Larger(LENGTH - 6, 0), 64))
    assert same_dim(Smaller(LENGTH + OTHER, 5) + 1, Smaller(LENGTH + OTHER + 1, 6))
    assert not same_dim(Smaller(LENGTH, 1000), LENGTH)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(-3, 6), st.integers(0, 60))
def test_what_is_written_for_tract_is_the_same_size(factor: int, divisor: int, constant: int, length: int) -> None:
    size = factor * LENGTH - Floor(LENGTH, divisor) + constant
    text = dim_text(size).replace("/", "//")
    assert eval(text, {"T": length}) == computed(size)({LENGTH: length})


def test_a_quotient_is_not_subtracted_from_what_it_is_of() -> None:
    assert dim_text(LENGTH - Floor(LENGTH, 2)) == "(T+1)/2"
    assert dim_text(LENGTH + OTHER - Floor(LENGTH, 3)) == "(2*T+3*U+2)/3"

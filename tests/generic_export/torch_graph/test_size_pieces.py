"""Sizes with the smaller or larger of one size and numbers have one form."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from generic_export.compat import torch_sympy
from generic_export.torch_graph.dims import dim_symbol
from generic_export.torch_graph.sizes.pieces import in_pieces
from generic_export.torch_graph.sizes.proofs import computed
from tests.engine_check import check

T, P = dim_symbol("T"), dim_symbol("P")
THIRD = torch_sympy.FloorDiv(T, 3)
Min, Max = torch_sympy.Min, torch_sympy.Max


@pytest.mark.parametrize(
    ("size", "form"),
    [
        (THIRD - Max(THIRD - 8, 0) - 2, Min(8, THIRD) - 2),
        (Min(8, THIRD) - Min(Min(8, THIRD) - 2, 1) - 2, Min(5, Max(0, THIRD - 3))),
        (Max(Min(8, THIRD) - 3, 0), Min(5, Max(0, THIRD - 3))),
        (Max(THIRD - 8, 0) + Min(8, THIRD) - 2, THIRD - 2),
        (T + P - Max(0, T + P - 8), Min(8, T + P)),
        (Min(24, 4 * T), 4 * Min(6, T)),
        (Max(1, T - 1) - 1, Max(0, T - 2)),
        (P + Max(0, THIRD - Min(3, THIRD)), P + Max(0, THIRD - 3)),
    ],
)
def test_the_form(size: sympy.Expr, form: sympy.Expr) -> None:
    assert in_pieces(size) == form


@pytest.mark.parametrize("size", [Max(T, P), THIRD * Max(T - 2, 0), Max(0, T - 8) - Max(0, T - 6) + Max(0, T - 3)])
def test_what_stays_as_it_is(size: sympy.Expr) -> None:
    assert in_pieces(size) == size


def _sizes(inner: sympy.Expr) -> st.SearchStrategy[sympy.Expr]:
    numbers = st.integers(-9, 9)
    lines = st.builds(lambda slope, constant: slope * inner + constant, st.sampled_from([-1, 0, 1, 2]), numbers)
    return st.recursive(
        lines,
        lambda parts: st.one_of(
            st.builds(lambda one, factor, other: one + factor * other, parts, st.sampled_from([-1, 1, 2, 4]), parts),
            st.builds(Min, parts, parts),
            st.builds(Max, parts, parts),
        ),
        max_leaves=6,
    )


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([T, T + P, THIRD, 2 * T]).flatmap(_sizes), st.integers(-9, 9))
def test_the_form_is_the_size_and_a_constant_changes_nothing_in_it(size: sympy.Expr, constant: int) -> None:
    form = sympy.sympify(in_pieces(sympy.sympify(size)))
    of_size, of_form = computed(sympy.sympify(size)), computed(form)
    for steps in range(30):
        values = {T: steps, P: 7 * steps % 11}
        assert of_size(values) == of_form(values)
    assert sympy.expand(in_pieces(sympy.expand(size + constant)) - form - constant) == 0


class _CutWindows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.unfold(1, 6, 3).mean(-1)
        steps = (windows[:, 1:] - windows[:, :-1])[:, -6:]
        return (steps[:, 1:] - steps[:, :-1]).flatten(1)


def test_cuts_of_cuts_load_in_the_engine() -> None:
    others = [(torch.randn(2, length, 4),) for length in (9, 12, 20, 26, 27, 40)]
    check(_CutWindows(), (torch.randn(2, 14, 4),), *others, dynamic_axes={"input_0": {0: "B", 1: "T"}})

"""Comparisons of sizes: what is proved holds at every size tried, and what PyTorch alone would answer by its example exports."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.compat import torch_sympy
from generic_export.torch_graph.sizes.answers import answer
from generic_export.torch_graph.sizes.guards import conditions_of
from generic_export.torch_graph.sizes.proofs import Branch
from tests.engine_check import check

_SIZE = sympy.Symbol("s", integer=True, positive=True)
_KINDS = (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)


@pytest.mark.parametrize(
    ("comparison", "least", "expected"),
    [
        (sympy.Ne(torch_sympy.Mod(2 * _SIZE - 1, _SIZE), 0), 2, True),
        (sympy.Ne(torch_sympy.Mod(2 * _SIZE - 1, _SIZE), 0), 1, None),  # of one position it is 0
        (torch_sympy.Min(8, _SIZE) <= _SIZE, 1, True),
        (sympy.Ge(torch_sympy.Min(8, _SIZE), 3), 3, True),
        (sympy.Ge(torch_sympy.Min(8, _SIZE), 4), 3, None),
        (sympy.Lt(torch_sympy.Max(8, _SIZE), _SIZE), 3, False),
        (sympy.Eq(4 + torch_sympy.Mod(_SIZE, 4), _SIZE), 8, False),
        (sympy.Eq(4 + torch_sympy.Mod(_SIZE, 4), _SIZE), 4, None),
    ],
)
def test_known_comparisons(comparison: sympy.Basic, least: int, expected: bool | None) -> None:
    assert answer(comparison, {_SIZE: least}) is expected


def _expressions() -> st.SearchStrategy[sympy.Expr]:
    linear = st.builds(lambda a, b: a * _SIZE + b, st.integers(-2, 3), st.integers(-3, 6))
    positive = st.builds(lambda a, b: a * _SIZE + b, st.integers(1, 2), st.integers(0, 2))
    pairs = st.tuples(linear, linear)
    return st.one_of(
        linear,
        st.builds(torch_sympy.FloorDiv, linear, st.integers(1, 5).map(sympy.Integer)),
        st.builds(torch_sympy.PythonMod, positive, positive),
        pairs.map(lambda terms: torch_sympy.Min(*terms)),
        pairs.map(lambda terms: torch_sympy.Max(*terms)),
    )


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(_KINDS), left=_expressions(), right=_expressions(), least=st.integers(1, 6))
def test_what_is_proved_holds(kind: type, left: sympy.Expr, right: sympy.Expr, least: int) -> None:
    said = answer(kind(left, right), {_SIZE: least})
    if said is not None:
        assert all(kind(left, right).subs(_SIZE, size) == said for size in range(least, least + 40))


def test_of_conditions_one_of_which_has_to_hold_the_example_chooses() -> None:
    height, width = (sympy.Symbol(name, integer=True, positive=True) for name in ("h", "w"))
    branch = Branch(sympy.Or(height > 2, width > 4), "")
    names = {height: sympy.Symbol("H"), width: sympy.Symbol("W")}
    assert [each.relation for each in conditions_of(branch, {height: 2, width: 9}, names)] == ["W >= 5"]


def test_a_relative_shift_exports() -> None:
    """[B, S, 2S] read as [B, 2S, S], its first row left out, and back: is 2S - 1 a multiple of S?"""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        batch, steps, _ = x.shape
        return x.reshape(batch, 2 * steps, steps)[:, 1:].reshape(batch, steps, 2 * steps - 1)[:, :, :steps]

    def model(x: torch.Tensor) -> torch.Tensor:
        return shifted(torch.cat([x @ x.mT, (x @ x.mT) * 2], dim=2))

    sizes = [(torch.randn(2, steps, 3),) for steps in (5, 4, 9)]
    check(model, *sizes, dynamic_axes={"input_0": {1: "S"}})


def test_a_unit_matrix_of_a_dynamic_size() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.eye(x.shape[1], device=x.device)

    check(model, (torch.randn(2, 5),), (torch.randn(2, 7),), dynamic_axes={"input_0": {1: "S"}})


def test_positions_counted_down_by_a_float() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[1], 0, -1.0)

    check(model, (torch.randn(2, 5),), (torch.randn(2, 7),), dynamic_axes={"input_0": {1: "S"}})

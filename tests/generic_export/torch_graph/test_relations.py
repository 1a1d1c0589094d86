"""Relations between sizes: what is read, what it means, and what tract's language has no word for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export.errors import OptionError
from generic_export.torch_graph.sizes.relations import Relation, Size

_ATOMS = st.sampled_from(["S", "T", "B"]) | st.integers(0, 50).map(str)


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: "({} {} {})".format(*parts))
    return (
        pairs
        | inner.map(lambda text: f"-{text}")
        | st.tuples(inner, st.integers(1, 9)).map(lambda p: f"({p[0]} / {p[1]})")
    )


_SIZES = st.recursive(_ATOMS, _compound, max_leaves=6)


@given(
    _SIZES, st.sampled_from(["==", "<", "<=", ">", ">="]), _SIZES, st.lists(st.integers(1, 40), min_size=3, max_size=3)
)
def test_renaming_and_rewriting_keep_the_meaning(left: str, sign: str, right: str, values: list[int]) -> None:
    sizes = dict(zip("STB", values, strict=True))
    relation = Relation.parse(f"{left} {sign} {right}")
    assert Relation.parse(relation.text) == relation
    renamed = relation.replaced({"S": "LONG", "T": values[1]})
    assert "S" not in renamed.symbols and "T" not in renamed.symbols
    assert renamed.holds({"LONG": values[0], "B": values[2]}) == relation.holds(sizes)


def test_division_truncates_as_tract_does() -> None:
    assert Relation.parse("(S - 4) / 3 == 0").holds({"S": 2})
    assert Relation.parse("S / 4 * 4 == S").holds({"S": 8})
    assert not Relation.parse("S / 4 * 4 == S").holds({"S": 9})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("S", "not a relation"),
        ("S = 3", "cannot be parsed"),
        ("S != 3", "not a relation"),
        ("1 <= S <= 3", "more than one comparison"),
        ("S <= 3 and T <= 3", "not a relation"),
        ("S <= 2.5", "not a size"),
        ("S <= T / S", "positive number"),
        ("S <= T / 0", "positive number"),
        ("S // 2 == 1", "not a size"),
        ("min(S, T) <= 3", "not a size"),
        ("S[0] <= 3", "not a size"),
        ("information <= 3", "be parsed by tract"),
        ("", "cannot be parsed"),
        ("S <= True", "not a size"),
    ],
)
def test_what_tract_cannot_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Relation.parse(text)


def test_sizes() -> None:
    assert Size.parse(" 2*S+T ").text == "2 * S + T"
    assert Size.parse("2*S+T").symbols == ("S", "T")
    with pytest.raises(OptionError, match="not a size"):
        Size.parse("S <= 3")


@pytest.mark.parametrize(
    ("text", "symbol", "least"),
    [
        ("T - U >= 0", "T", "U"),
        ("T > U + 2", "T", "U + 3"),
        ("2*U <= T", "T", "2*U"),
        ("U - T < 4", "T", "U - 3"),
    ],
)
def test_what_a_size_is_never_smaller_than(text: str, symbol: str, least: str) -> None:
    larger = Relation.parse(text).larger
    assert larger is not None
    assert (str(larger[0]), str(larger[1])) == (symbol, least)


@pytest.mark.parametrize("text", ["T >= 3", "T == U", "2*T >= 3*U", "T >= 2*(U/2)"])
def test_relations_that_make_no_size_the_larger_one(text: str) -> None:
    assert Relation.parse(text).larger is None

"""Text stops where it is told to, however it comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from t2n_llm.runtime.sampling.text import until_stop

_TEXT = st.text("abc", max_size=12)


@given(pieces=st.lists(_TEXT, max_size=6), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_text(pieces: list[str], stops: list[str]) -> None:
    whole, found = "".join(pieces), list[str]()
    got = "".join(until_stop(iter(pieces), stops, found.append))
    places = [whole.find(stop) for stop in stops if stop in whole]
    # The earliest stop text, unless one that is shorter and further on was whole in an earlier piece.
    assert bool(found) is bool(places)
    if not places:
        assert got == whole
    else:
        assert whole.startswith(got + found[0])
        assert not any(stop in got for stop in stops)


def test_what_cannot_become_a_stop_text_comes_at_once() -> None:
    pieces = iter(["Hi", " Us", "her", "\nUse", "r:", " never"])
    found: list[str] = []
    assert list(until_stop(pieces, ["\nUser:"], found.append)) == ["Hi", " Us", "her"]
    assert found == ["\nUser:"] and next(pieces) == " never"

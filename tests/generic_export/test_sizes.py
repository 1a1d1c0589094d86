"""Sizes as users write them: every form that one of the options ever took."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export.errors import OptionError
from generic_export.sizes import parse_size

_FACTORS = {"": 1} | {
    prefix + i: (1024 if i else 1000) ** power for power, prefix in enumerate("kmgt", start=1) for i in ("", "i")
}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("900MB", 900_000_000),
        ("1.5 GiB", 3 << 29),
        ("1.5gib", 3 << 29),
        (12, 12),
        (9e8, 900_000_000),
        ("3kb", 3000),
        ("7", 7),
        ("8g", 8 * 10**9),
        ("8Gi", 8 << 30),
        ("1TB", 10**12),
        (" 64MiB ", 64 << 20),
        ("5B", 5),
        ("0", 0),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-3MB", "3 MBit", True, "MB", "1e9", "8XB", "many", -1, ".5GB", "1.GB", "2 2"])
def test_no_sizes(text: str | float) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(text)
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(text, positive=True)


@pytest.mark.parametrize("text", ["0MB", 0])
def test_nothing_is_refused_where_it_has_no_meaning(text: str | int) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(text, positive=True)


@given(
    st.integers(0, 10**30),
    st.one_of(st.none(), st.text("0123456789", min_size=1, max_size=30)),
    st.sampled_from(sorted(_FACTORS)),
    st.sampled_from(["", "b"]),
    st.sampled_from(["", " "]),
    st.data(),
)
def test_any_number_with_any_unit(
    whole: int, digits: str | None, unit: str, letter: str, gap: str, data: st.DataObject
) -> None:
    number = str(whole) if digits is None else f"{whole}.{digits}"
    word = "".join(data.draw(st.sampled_from([one.lower(), one.upper()])) for one in unit + letter)
    assert parse_size(f"{gap}{number}{gap}{word}{gap}") == int(Fraction(number) * _FACTORS[unit])


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_error_that_names_it(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except OptionError as error:
        assert repr(text) in str(error)
        assert "such as" in str(error.hint)

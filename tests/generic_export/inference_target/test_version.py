"""Release numbers: read, printed, ordered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export import SemanticVersion
from generic_export.errors import OptionError

numbers = st.integers(0, 999)
labels = st.sampled_from(["", "alpha", "alpha.1", "alpha.beta", "beta", "beta.2", "beta.11", "rc.1"])
versions = st.builds(SemanticVersion, numbers, numbers, numbers, labels)


@given(versions)
def test_text_and_back(version: SemanticVersion) -> None:
    assert SemanticVersion.parse(str(version)) == version


@given(st.tuples(numbers, numbers, numbers), st.tuples(numbers, numbers, numbers))
def test_numbers_compare_as_numbers(left: tuple[int, int, int], right: tuple[int, int, int]) -> None:
    assert (SemanticVersion(*left) < SemanticVersion(*right)) is (left < right)


@given(versions, versions)
def test_the_order_is_total(left: SemanticVersion, right: SemanticVersion) -> None:
    assert [left < right, left == right, left > right].count(True) == 1


def test_precedence_of_the_specification() -> None:
    # Semantic Versioning 2.0.0, §11.4
    texts = ["1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11",
             "1.0.0-rc.1", "1.0.0", "1.0.1"]  # fmt: skip
    parsed = [SemanticVersion.parse(text) for text in texts]
    assert sorted(parsed[4:] + parsed[:4]) == parsed and len(set(parsed)) == len(texts)


def test_what_stands_around_a_version() -> None:
    assert SemanticVersion.parse(" v0.23.9+build.5 ") == SemanticVersion(0, 23, 9)
    assert str(SemanticVersion.parse("0.23")) == "0.23.0"


@pytest.mark.parametrize("text", ["", "newest", "0", "0.23.9.1", "0.-1.2", "00.1.2", "0.23.9-", "0.23.x", None])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(OptionError, match="is not a version"):
        SemanticVersion.parse(text)

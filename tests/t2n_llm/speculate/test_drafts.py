"""What followed the end of a text when it stood there before; and how long drafts get."""

from __future__ import annotations

import pytest

from t2n_llm.speculate.drafts import continuation


@pytest.mark.parametrize(
    ("text", "followed"),
    [
        ([1, 2, 3, 4, 1, 2], (3, 4, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # the last time counts
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], (5, 8, 1)),  # more tokens count more
        ([1, 2, 9, 1, 2], (9, 1, 2)),
        ([7, 7, 7], (7,)),
        ([1, 2, 3, 4], ()),
        ([5, 1, 5], ()),  # a single token says too little
        ([5], ()),
        ([], ()),
    ],
)
def test_continuation(text: list[int], followed: tuple[int, ...]) -> None:
    assert continuation(text, 4, 2, 3) == followed

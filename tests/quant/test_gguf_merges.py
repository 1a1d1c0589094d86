"""Merges that a vocabulary implies: those of transformers, in its order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.prequantized.gguf_merges import merges_of

TOKENS = st.lists(st.text("abc▁", min_size=1, max_size=6), unique=True, max_size=40)


def theirs(vocab: dict[str, int], scores: dict[str, float] | None) -> list[tuple[str, str]]:
    base = pytest.importorskip("transformers.tokenization_utils_base")
    if not hasattr(base, "generate_merges"):
        pytest.skip("this release of transformers makes merges elsewhere")
    made: list[tuple[str, str]] = base.generate_merges(vocab, scores)
    return made


@settings(max_examples=200, deadline=None)
@given(tokens=TOKENS, few=st.integers(1, 40), data=st.data())
def test_the_merges_of_transformers(tokens: list[str], few: int, data: st.DataObject) -> None:
    vocab = {token: index for index, token in enumerate(data.draw(st.permutations(tokens)))}
    by_score = {token: float(data.draw(st.integers(0, few))) for token in tokens}  # ties among them
    for scores in (None, by_score, {token: -index for index, token in enumerate(tokens)}):
        assert merges_of(vocab, scores) == theirs(vocab, scores)

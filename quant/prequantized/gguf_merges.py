"""The merges of a vocabulary that comes without: every way to cut a token into two that are tokens too, best token first.

In: token -> number, token -> score. Out: pairs in the order of their merging, as transformers' `generate_merges` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

_Pair = tuple[str, str]


def merges_of(vocab: Mapping[str, int], vocab_scores: Mapping[str, float] | None = None) -> list[_Pair]:
    """Return the merges that a vocabulary implies.

    Args:
        vocab: token -> its number.
        vocab_scores: token -> how good it is, the highest first; None takes the numbers, the lowest first.
    """
    best_first = vocab_scores is not None
    scores = vocab if vocab_scores is None else vocab_scores
    merges: list[_Pair] = []
    for _, tokens in groupby(sorted(scores, key=scores.__getitem__, reverse=best_first), scores.__getitem__):
        first, *others = tokens
        pairs = _cuts(first, vocab)
        if others:  # of tokens that are as good as each other, the pieces decide
            lots = (pairs, *(_cuts(token, vocab) for token in others))
            pairs = [pair for lot in lots for pair in sorted(lot, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
            pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=best_first)
        elif best_first:
            pairs.reverse()
        merges += pairs
    return merges


def _cuts(token: str, vocab: Mapping[str, int]) -> list[_Pair]:
    """Return the ways to cut a token, the shortest first half first."""
    return [
        (left, right)
        for cut in range(1, len(token))
        if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
    ]


__all__ = ["merges_of"]

"""The merges of a vocabulary that comes without: every way to cut a token into two that are tokens too, best token first.

In: token -> number, token -> score. Out: pairs in the order of their merging, as transformers' `generate_merges` gives them.
Pieces are found by hashes of all prefixes and suffixes at once; each pair that is found is then compared letter by letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]
_Hashes = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


class _Letters(NamedTuple):
    """Strings one after the other, with the hash of each part of them at hand.

    Attributes:
        starts, ends: of each string among the letters.
        sums: of letter times power of the base, up to each place; uint64 [letters + 1].
        scales: what makes the hash of a part that begins at a place independent of the place; uint64 [letters + 1].
    """

    starts: _Numbers
    ends: _Numbers
    sums: _Hashes
    scales: _Hashes

    def hashes(self, starts: _Numbers, ends: _Numbers) -> _Hashes:
        return (self.sums[ends] - self.sums[starts]) * self.scales[starts]


def merges_of(vocab: Mapping[str, int], vocab_scores: Mapping[str, float] | None = None) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary implies.

    Args:
        vocab: token -> its number.
        vocab_scores: token -> how good it is, the highest first; None takes the numbers, the lowest first.
    """
    best_first = vocab_scores is not None
    scores = vocab if vocab_scores is None else vocab_scores
    tokens, pieces = list(scores), list(vocab)
    if not pieces or not tokens:
        return []
    token, left, right = _cuts(tokens, pieces)
    sign = -1 if best_first else 1
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    numbers = np.fromiter(vocab.values(), np.int64, len(pieces))
    values = np.fromiter(scores.values(), np.float64, len(tokens))
    least_last = (
        numbers[right],
        numbers[left],
        token,
        sign * lengths[right],
        sign * lengths[left],
        sign * values[token],
    )
    order = np.lexsort(least_last)
    found = zip(*(each[order].tolist() for each in (token, left, right)), strict=True)
    wholes = ((tokens[whole], pieces[first], pieces[second]) for whole, first, second in found)
    return [(first, second) for whole, first, second in wholes if first + second == whole]


def _cuts(tokens: Sequence[str], pieces: Sequence[str]) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return, for each way to cut a token into two pieces, the numbers of the token and of both pieces in their lists."""
    whole, parts = _letters(tokens), _letters(pieces)
    known = parts.hashes(parts.starts, parts.ends)
    order = np.argsort(known)
    known = known[order]
    token = np.repeat(np.arange(len(tokens)), whole.ends - whole.starts)
    place = np.arange(len(token))
    inside = place != whole.starts[token]
    token, place = token[inside], place[inside]
    left, found = _find(whole.hashes(whole.starts[token], place), known)
    token, place, left = token[found], place[found], left[found]
    right, found = _find(whole.hashes(place, whole.ends[token]), known)
    return token[found], order[left[found]], order[right[found]]


def _letters(texts: Sequence[str]) -> _Letters:
    letters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    starts = np.concatenate(([0], ends[:-1]))
    powers, scales = (_powers(base, len(letters) + 1) for base in (_BASE, pow(_BASE, -1, 1 << 64)))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum((letters + np.uint64(1)) * powers[:-1], dtype=np.uint64)))
    return _Letters(starts, ends, sums, scales)


def _powers(base: int, count: int) -> _Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _find(wanted: _Hashes, known: _Hashes) -> tuple[_Numbers, NDArray[np.bool_]]:
    """Return where each hash is among the known ones, which are in order, and whether it is there."""
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return places, known[places] == wanted


__all__ = ["merges_of"]

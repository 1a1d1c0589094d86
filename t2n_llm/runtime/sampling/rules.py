"""What changes the scores of the next token whether it is sampled or not, as transformers' logits processors do.

In: scores [vocab], float64, and the tokens so far. Out: new scores; minus infinity where a token may not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

NEVER = -np.inf


@dataclass(frozen=True)
class Said:
    """The tokens before the next one.

    Attributes:
        tokens: all of them.
        given: how many of them were given: the prompt, or what a decoder starts with.
    """

    tokens: Sequence[int]
    given: int

    @property
    def new(self) -> int:
        """How many were decided."""
        return len(self.tokens) - self.given


class ScoreRule(Protocol):
    """One change of scores."""

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """Return new scores [vocab], float64; those given stay as they are."""
        ...


@dataclass(frozen=True)
class SequenceBias:
    """Adds to the score of the token that would complete a sequence.

    Attributes:
        biases: sequences and what is added; minus infinity forbids one.
    """

    biases: tuple[tuple[tuple[int, ...], float], ...]

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        biased = scores.copy()
        for sequence, bias in self.biases:
            before = len(sequence) - 1
            fits = before == 0 or tuple(said.tokens[-before:]) == sequence[:-1]
            if fits and sequence[-1] < len(biased):
                biased[sequence[-1]] += bias
        return biased


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides the scores of tokens that occur already, or multiplies those below zero (Keskar et al. 2019, section 4.1)."""

    penalty: float

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        changed = scores.copy()
        seen = _within(sorted(set(said.tokens)), scores)
        changed[seen] = np.where(scores[seen] < 0, scores[seen] * self.penalty, scores[seen] / self.penalty)
        return changed


@dataclass(frozen=True)
class NoRepeatNGram:
    """Lets no sequence of so many tokens occur twice."""

    size: int

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        if len(said.tokens) < self.size:
            return scores
        known = np.asarray(said.tokens, np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(known, self.size)
        same = (windows[:, :-1] == known[len(known) + 1 - self.size :]).all(axis=1)
        return _without(scores, windows[same, -1])


@dataclass(frozen=True)
class ShortestText:
    """Lets no text end before it has so many tokens.

    Attributes:
        length: the least number of tokens.
        ends: tokens that end a text.
        counts_given: whether those that were given count.
    """

    length: int
    ends: tuple[int, ...]
    counts_given: bool

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        count = len(said.tokens) if self.counts_given else said.new
        return _without(scores, self.ends) if count < self.length else scores


@dataclass(frozen=True)
class ForcedFirst:
    """Lets one token alone come after a single given one."""

    token: int

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        if len(said.tokens) != 1:
            return scores
        forced = np.full_like(scores, NEVER)
        forced[self.token] = 0
        return forced


@dataclass(frozen=True)
class Suppressed:
    """Tokens that are never said."""

    tokens: tuple[int, ...]

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        del said
        return _without(scores, self.tokens)


@dataclass(frozen=True)
class SuppressedFirst:
    """Tokens that are not said first.

    Attributes:
        tokens: they.
        after_forced: whether the first token is forced where a single one is given; then it is about the second.
    """

    tokens: tuple[int, ...]
    after_forced: bool = False

    def applied(self, scores: np.ndarray, said: Said) -> np.ndarray:
        """See `ScoreRule`."""
        first = 1 if self.after_forced and said.given <= 1 else 0
        return _without(scores, self.tokens) if said.new == first else scores


def rules_of(settings: Mapping[str, Any], ends: Sequence[int]) -> tuple[ScoreRule, ...]:
    """Return the rules that settings ask for, in the order of transformers' `generate()`.

    Args:
        settings: by transformers' names.
        ends: tokens that end a text.
    """
    bias, words = settings.get("sequence_bias"), settings.get("bad_words_ids")
    ngram, forced = settings.get("no_repeat_ngram_size"), settings.get("forced_bos_token_id")
    penalty = settings.get("repetition_penalty")
    rules: list[ScoreRule] = []
    if bias:
        rules.append(SequenceBias(tuple((tuple(sequence), float(value)) for sequence, value in bias)))
    if penalty is not None and penalty != 1:
        rules.append(RepetitionPenalty(float(penalty)))
    if ngram:
        rules.append(NoRepeatNGram(int(ngram)))
    if words:
        forbidden = [tuple(word) for word in words if list(word) not in [[end] for end in ends]]
        rules.append(SequenceBias(tuple((word, NEVER) for word in forbidden)))
    for name, counts_given in (("min_length", True), ("min_new_tokens", False)):
        if settings.get(name) and ends:
            rules.append(ShortestText(int(settings[name]), tuple(ends), counts_given))
    if forced is not None:
        rules.append(ForcedFirst(int(forced)))
    if settings.get("suppress_tokens"):
        rules.append(Suppressed(tuple(settings["suppress_tokens"])))
    if settings.get("begin_suppress_tokens"):
        rules.append(SuppressedFirst(tuple(settings["begin_suppress_tokens"]), after_forced=forced is not None))
    return tuple(rules)


def _within(tokens: Sequence[int], scores: np.ndarray) -> np.ndarray:
    """Return the tokens that have a score: a vocabulary may be longer than what a model says."""
    each = np.asarray(tokens, np.int64)
    return each[(each >= 0) & (each < len(scores))]


def _without(scores: np.ndarray, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    left = scores.copy()
    left[_within(np.asarray(tokens, np.int64).tolist(), scores)] = NEVER
    return left


__all__ = [
    "ForcedFirst",
    "NoRepeatNGram",
    "RepetitionPenalty",
    "Said",
    "ScoreRule",
    "SequenceBias",
    "ShortestText",
    "Suppressed",
    "SuppressedFirst",
    "rules_of",
]

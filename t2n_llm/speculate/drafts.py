"""Guesses at the next tokens: of a small model, or of the text itself.

In: the text so far. Out: a `Draft`: tokens, and what each was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from t2n_llm.sampling.choice import TokenChoice, certain, drawn
from t2n_llm.sampling.rules import Said
from t2n_llm.speculate.rewinding import RewindableTokens

LONGEST_NGRAM = 4
SHORTEST_NGRAM = 2
"""A single token that occurred before says little of what follows."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        tokens: in order; none where there is no guess.
        likely: what each was drawn from, [vocab] a token; None where each was certain.
    """

    tokens: tuple[int, ...] = ()
    likely: tuple[np.ndarray, ...] | None = None

    def of(self, place: int, size: int) -> np.ndarray:
        """Return what a token was drawn from, as a distribution over so many tokens."""
        if self.likely is None:
            return certain(self.tokens[place], size)
        drawn_from = self.likely[place]
        return np.pad(drawn_from, (0, size - len(drawn_from)))


class Drafter(Protocol):
    """Something that guesses."""

    def draft(self, said: Said, most: int, random: np.random.Generator) -> Draft:
        """Return a guess at what comes next.

        Args:
            said: the text so far.
            most: tokens of the guess.
            random: where draws come from.
        """
        ...

    def forget(self) -> None:
        """Forget every text that was read."""
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Guesses what followed when the end of the text last stood there before (prompt lookup decoding, Saxena 2023).

    Attributes:
        longest: tokens of the end that are looked for first.
        shortest: tokens that are looked for last.
    """

    longest: int = LONGEST_NGRAM
    shortest: int = SHORTEST_NGRAM

    def draft(self, said: Said, most: int, random: np.random.Generator) -> Draft:
        """See `Drafter`; nothing is drawn."""
        del random
        return Draft(continuation(said.tokens, self.longest, self.shortest, most))

    def forget(self) -> None:
        """See `Drafter`; nothing is kept."""


def continuation(text: Sequence[int], longest: int, shortest: int, most: int) -> tuple[int, ...]:
    """Return what followed the last earlier occurrence of the text's end, of the longest end that occurs earlier.

    Args:
        text: tokens.
        longest, shortest: tokens of the end, from so many down to so few.
        most: tokens to return; fewer where the text ends before.
    """
    known = np.asarray(text, np.int64)
    for size in range(min(longest, len(known) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(known[:-1], size)
        places = np.flatnonzero((windows == known[-size:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            return tuple(known[start : start + most].tolist())
    return ()


class ModelDrafts:
    """Guesses what a small model says next; it chooses as the target does."""

    def __init__(
        self,
        held: RewindableTokens,
        choice: TokenChoice,
        *,
        vocab_size: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Describe a model.

        Args:
            held: what it has read.
            choice: how the target chooses a token.
            vocab_size: tokens that both models have, of tables padded to different sizes; no others are guessed, and nothing
                is guessed after others. None for all.
            max_positions: its longest context; it guesses nothing beyond. None for any.
        """
        self._held, self._choice = held, choice
        self._vocab_size, self._max_positions = vocab_size, max_positions

    def draft(self, said: Said, most: int, random: np.random.Generator) -> Draft:
        """See `Drafter`.

        Raises:
            EngineError: the engine failed.
        """
        text = list(said.tokens)
        if not self._reads(text):
            return Draft()
        room = most if self._max_positions is None else min(most, self._max_positions - len(text) + 1)
        tokens: list[int] = []
        likely: list[np.ndarray] = []
        while len(tokens) < room:
            logits = self._held.continue_with([*text, *tokens])[: self._vocab_size]
            likely.append(self._choice.distribution(logits, Said([*text, *tokens], said.given)))
            tokens.append(drawn(likely[-1], random) if self._choice.samples else int(likely[-1].argmax()))
        return Draft(tuple(tokens), tuple(likely))

    def forget(self) -> None:
        """See `Drafter`."""
        self._held.keep(0)

    def _reads(self, text: Sequence[int]) -> bool:
        """Return whether the model has a row for each token: the engine dies of others."""
        return self._vocab_size is None or max(text) < self._vocab_size


__all__ = ["LONGEST_NGRAM", "SHORTEST_NGRAM", "Draft", "Drafter", "ModelDrafts", "PromptLookup", "continuation"]

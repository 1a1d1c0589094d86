"""An answer whose tokens are guessed first, and checked by the target several at a time.

In: a prompt, something that guesses, a choice. Out: pieces of text, and how many guesses were right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from t2n_llm.measure.answering import Account, AnswerEnding, Limit
from t2n_llm.sampling.choice import TokenChoice
from t2n_llm.sampling.rules import Said
from t2n_llm.sampling.text import text_pieces, until_stop
from t2n_llm.speculate.acceptance import accepted_or_drawn
from t2n_llm.speculate.drafts import Draft, Drafter
from t2n_llm.speculate.rewinding import RewindableTokens


@dataclass(frozen=True)
class DraftTally:
    """What came of guessing.

    Attributes:
        runs: of the target, after the prompt.
        decided: tokens that these runs decided.
        drafted, accepted: tokens that were guessed, and those of them that stayed.
        draft_seconds: that guessing took.
    """

    runs: int = 0
    decided: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that stayed; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_run(self) -> float | None:
        """Tokens that a run of the target decided; None without any."""
        return self.decided / self.runs if self.runs else None

    def asdict(self) -> dict[str, int | float | None]:
        """Return it for JSON."""
        return {
            "runs": self.runs,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "acceptance": self.acceptance,
            "tokens_per_run": self.tokens_per_run,
            "draft_seconds": self.draft_seconds,
        }


@dataclass
class SpeculativeAnswer:
    """The text that follows a prompt: iterate over it, once.

    Attributes:
        held: what the target's engine has read; of the answer, all but the last token is there afterwards.
        drafter: what guesses.
        ids: the prompt.
        choice: how a token is chosen.
        limit: most tokens.
        draft_tokens: tokens to guess at once.
        decode: makes tokens text.
        random: where draws come from.
        tokens: of the answer, so far.
        tally: what came of guessing, so far.
    """

    held: RewindableTokens
    drafter: Drafter
    ids: Sequence[int]
    choice: TokenChoice
    limit: Limit
    draft_tokens: int
    decode: Callable[[Sequence[int]], str]
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    tally: DraftTally = field(default_factory=DraftTally)
    _ending: AnswerEnding = AnswerEnding.STOPPED
    _times: list[float] = field(default_factory=list)

    @property
    def account(self) -> Account:
        """What it took so far; the last word when it has ended."""
        start, first, last = (*self._times, *self._times[-1:] * 2)[:3] if self._times else (0.0, 0.0, 0.0)
        return Account(0, len(self.ids), len(self.tokens), first - start, last - first, self._ending)

    def __iter__(self) -> Iterator[str]:
        """Yield pieces of text as they are final.

        Raises:
            EngineError: an engine failed.
        """
        return until_stop(text_pieces(self.decode, self._said()), self.choice.stops, self._found)

    def _found(self, stop: str) -> None:
        del stop
        self._ending = AnswerEnding.STOP_TEXT

    def _said(self) -> Iterator[int]:
        """Yield the tokens of the answer up to where it ends, also where that is in the middle of what a run decided."""
        for token in self._decided():
            if token in self.choice.ends:
                self._ending = AnswerEnding.END_TOKEN
                return
            self.tokens.append(token)
            yield token
            if len(self.tokens) == self.limit.tokens:
                self._ending = self.limit.ending
                return

    def _decided(self) -> Iterator[int]:
        """Yield tokens run by run, without an end."""
        self._times = [time.perf_counter()]
        logits = self.held.continue_with(self.ids)
        self._times.append(time.perf_counter())
        first = self.choice.next_token(logits, Said(self.ids, len(self.ids)), self.random)
        self._times.append(time.perf_counter())
        yield first
        while True:
            yield from self._run()

    def _run(self) -> Sequence[int]:
        """Guess, run the target once, and return what that decides: one token more than guesses stay."""
        said = Said([*self.ids, *self.tokens], len(self.ids))
        draft = self._drafted(said)
        rows = self.held.read_at_once([said.tokens[-1], *draft.tokens])[-len(draft.tokens) - 1 :]
        decided = self._judged(said, draft, rows)
        accepted = len(decided) - 1
        self.held.keep(len(said.tokens) + accepted)
        self.tally = replace(
            self.tally,
            runs=self.tally.runs + 1,
            decided=self.tally.decided + len(decided),
            drafted=self.tally.drafted + len(draft.tokens),
            accepted=self.tally.accepted + accepted,
        )
        self._times[2:] = [time.perf_counter()]
        return decided

    def _drafted(self, said: Said) -> Draft:
        most = min(self.draft_tokens, self.limit.tokens - len(self.tokens) - 1)  # the target adds one of its own
        if most < 1:
            return Draft()
        start = time.perf_counter()
        draft = self.drafter.draft(said, most, self.random)
        seconds = self.tally.draft_seconds + time.perf_counter() - start
        self.tally = replace(self.tally, draft_seconds=seconds)
        return draft

    def _judged(self, said: Said, draft: Draft, rows: np.ndarray) -> list[int]:
        """Return the guesses that stay, and the token that the target says after them."""
        decided: list[int] = []
        for place, guess in enumerate(draft.tokens):
            before = Said([*said.tokens, *decided], said.given)
            decided.append(self._in_place_of(guess, rows[place], draft, place, before))
            if decided[-1] != guess:
                return decided
        after = Said([*said.tokens, *decided], said.given)
        return [*decided, self.choice.next_token(rows[len(decided)], after, self.random)]

    def _in_place_of(self, guess: int, logits: np.ndarray, draft: Draft, place: int, before: Said) -> int:
        if not self.choice.samples:
            return self.choice.next_token(logits, before, self.random)
        target = self.choice.distribution(logits, before)
        return accepted_or_drawn(target, draft.of(place, len(target)), guess, self.random)


__all__ = ["DraftTally", "SpeculativeAnswer"]

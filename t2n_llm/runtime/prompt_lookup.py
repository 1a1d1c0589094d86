"""Prompt lookup decoding (Saxena 2023): tokens are guessed from the text before them, and checked several at a time.

In: an export that returns all logits, a prompt and sampling settings. Out: the same answer as without guesses, and how many
guesses were right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.runner import RewindableSession, WheelRunner
from t2n_llm.export.folder import read_manifest
from t2n_llm.runtime.answering import HeldTokens, StreamedAnswer
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.rules import Said

_LONGEST_NGRAM = 4
_SHORTEST_NGRAM = 2  # a single token predicts too little


@dataclass(frozen=True)
class GuessCounts:
    """How many guesses were right.

    Attributes:
        runs: of the engine, after the prompt.
        decided: tokens that these runs decided.
        guessed, accepted: tokens that were guessed, and those of them that were right.
    """

    runs: int = 0
    decided: int = 0
    guessed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that were right; None without any."""
        return self.accepted / self.guessed if self.guessed else None

    @property
    def tokens_per_run(self) -> float | None:
        """Tokens that a run decided on average; None without any run."""
        return self.decided / self.runs if self.runs else None

    def asdict(self) -> dict[str, int | float | None]:
        """Return them for JSON."""
        return {
            "runs": self.runs,
            "guessed_tokens": self.guessed,
            "accepted_tokens": self.accepted,
            "acceptance": self.acceptance,
            "tokens_per_run": self.tokens_per_run,
        }


class RewindableTokens(HeldTokens):
    """A session of the engine that can forget tokens from the end, and the tokens that it holds."""

    _session: RewindableSession | None

    def keep(self, count: int) -> None:
        """Forget all tokens after the first `count`."""
        if self._session is not None and count < len(self._tokens):
            self._session.keep(count)
            self._tokens = self._tokens[:count]


class LookupAnswer(StreamedAnswer):
    """A streamed answer whose tokens are guessed first.

    Each token is chosen as without guesses, with the same random numbers; a guess that differs from it is dropped, with all
    after it. So the answer is the same, except for rounding: the engine sums in another order for several tokens at once.

    Attributes:
        counts: of the guesses so far.
    """

    _held: RewindableTokens

    def __init__(self, *arguments: Any, guessed_tokens: int, **options: Any) -> None:
        """Describe an answer.

        Args:
            arguments, options: of `StreamedAnswer`.
            guessed_tokens: most tokens to guess at once.
        """
        super().__init__(*arguments, **options)
        self.counts = GuessCounts()
        self._guessed_tokens = guessed_tokens

    def _chosen(self) -> Iterator[int]:
        logits = self._held.read(self._ids, self._stopped)
        self._times.append(time.perf_counter())
        if logits is None:
            return
        said = Said(list(self._held.tokens), len(self._held.tokens))
        decided = [self._choice.next_token(logits, said, self._random)]
        while True:
            yield from decided
            said = _after(said, decided)
            decided = self._run(said)

    def _run(self, said: Said) -> list[int]:
        """Guess, run the engine once, and return what it decides: the guesses that are right, and one token more."""
        most = min(self._guessed_tokens, self._limit.tokens - said.new - 1)
        guess = continuation(said.tokens, most)
        rows = self._held.read_at_once([said.tokens[-1], *guess])[-len(guess) - 1 :]
        decided: list[int] = []
        for row, guessed in zip(rows, (*guess, None), strict=True):
            decided.append(self._choice.next_token(row, _after(said, decided), self._random))
            if decided[-1] != guessed:
                break
        self._held.keep(len(said.tokens) + len(decided) - 1)
        counts = self.counts
        self.counts = replace(
            counts,
            runs=counts.runs + 1,
            decided=counts.decided + len(decided),
            guessed=counts.guessed + len(guess),
            accepted=counts.accepted + len(decided) - 1,
        )
        return decided


def continuation(text: Sequence[int], most: int) -> tuple[int, ...]:
    """Return what followed the last earlier occurrence of the text's end, of the longest end that occurs earlier.

    Args:
        text: tokens.
        most: tokens to return; fewer where the text ends before.
    """
    known = np.asarray(text, np.int64)
    for size in range(min(_LONGEST_NGRAM, len(known) - 1), _SHORTEST_NGRAM - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(known[:-1], size)
        places = np.flatnonzero((windows == known[-size:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            return tuple(known[start : start + most].tolist())
    return ()


def require_logits(model: ExportedModel, guessed_tokens: int) -> None:
    """Refuse an export without logits for each guess.

    Raises:
        OptionError: it has fewer positions than guesses and the token before them.
    """
    kept = read_manifest(model.folder).get("options", {}).get("num_logits_to_keep", 1)
    needed = guessed_tokens + 1
    if 0 < kept < needed:
        raise OptionError(
            f"{model.folder} gives the logits of {kept} position{'s' if kept > 1 else ''}, --prompt-lookup needs {needed}.",
            "Export it with --num-logits-to-keep 0" + (", or use fewer --prompt-lookup-tokens." if kept > 1 else "."),
        )


@contextmanager
def opened_rewindable(model: ExportedModel) -> Iterator[RewindableTokens]:
    """Yield a session of the engine; it ends with the block.

    Raises:
        EngineError: the engine refuses the archive.
        EngineLoadError: the archive has states that cannot be cut: the engine's own, fixed ones, windows.
    """
    with WheelRunner(model.archive, TractWheel(device=model.device)) as runner:
        yield RewindableTokens(runner.open_rewindable, model.prefill)


def lookup_answer(
    model: ExportedModel,
    held: RewindableTokens,
    ids: Sequence[int],
    choice: TokenChoice,
    *,
    max_new_tokens: int | None = None,
    guessed_tokens: int,
) -> LookupAnswer:
    """Return the text that comes after tokens.

    Args:
        model: an export that passes `require_logits`.
        held: of `opened_rewindable`.
        ids: what is read after the tokens that are held.
        choice: how a token is chosen.
        max_new_tokens: as of `ExportedModel.generate`.
        guessed_tokens: most tokens to guess at once.

    Raises:
        OptionError: there is no token, or no position is left.
    """
    return LookupAnswer(
        held,
        ids,
        choice,
        model.limit(len(held.tokens) + len(ids), max_new_tokens),
        decode=model.decode,
        random=choice.random(),
        guessed_tokens=guessed_tokens,
    )


def _after(said: Said, decided: Sequence[int]) -> Said:
    return Said([*said.tokens, *decided], said.given)


__all__ = [
    "GuessCounts",
    "LookupAnswer",
    "RewindableTokens",
    "continuation",
    "lookup_answer",
    "opened_rewindable",
    "require_logits",
]

"""An answer of a language model in tract, as it comes: tokens are read, chosen one after another, and become text.

In: a session of the engine, new tokens, a choice. Out: pieces of text, and what they took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from generic_export.inference_target.tract.engines.engine import EngineSession
from t2n_llm.graph.prefill import Chunks, chunk_after
from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.rules import Said
from t2n_llm.runtime.sampling.text import text_pieces, until_stop


class AnswerEnding(Enum):
    """Why an answer ended."""

    END_TOKEN = "end token"
    STOP_TEXT = "stop text"
    MOST_TOKENS = "most tokens"
    CONTEXT = "longest context"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Limit:
    """How many tokens an answer may have.

    Attributes:
        tokens: so many.
        ending: what is said where it gets there.
    """

    tokens: int
    ending: AnswerEnding = AnswerEnding.MOST_TOKENS


@dataclass(frozen=True)
class Account:
    """What an answer took.

    Attributes:
        held_tokens: that the engine's state held already.
        read_tokens: that it was given before the answer.
        tokens: of the answer, without the one that ends it.
        read_seconds: until the first token could be chosen.
        seconds: from then on.
        ending: why it ended.
    """

    held_tokens: int
    read_tokens: int
    tokens: int
    read_seconds: float
    seconds: float
    ending: AnswerEnding

    @property
    def ended(self) -> bool:
        """Whether it came to its end; else it was stopped."""
        return self.ending is not AnswerEnding.STOPPED

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the answer; None where it took no time that can be measured."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    def asdict(self) -> dict[str, int | float | str | None]:
        """Return it for JSON."""
        return {
            "prompt_tokens": self.held_tokens + self.read_tokens,
            "held_tokens": self.held_tokens,
            "read_tokens": self.read_tokens,
            "tokens": self.tokens,
            "read_seconds": self.read_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "ending": self.ending.value,
        }


class HeldTokens:
    """A session of the engine, and the tokens that its state holds."""

    def __init__(self, open_session: Callable[[], EngineSession], chunks: Chunks) -> None:
        """Open a session.

        Args:
            open_session: makes a fresh one.
            chunks: how many tokens are fed at once.
        """
        self._open, self._chunks = open_session, chunks
        self._session: EngineSession | None = open_session()
        self._tokens: list[int] = []

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that were read, in order."""
        return self._tokens

    def forget(self) -> None:
        """Begin anew, with an empty state."""
        if self._session is not None and self._tokens:
            self._session.close()
            self._session = None
        self._tokens = []
        self._session = self._session or self._open()

    def read(self, ids: Sequence[int], stopped: Callable[[], bool] | None = None) -> np.ndarray | None:
        """Read tokens after those that are held.

        Args:
            ids: one or more.
            stopped: asked before each chunk after the first whether to go on.

        Returns:
            The logits [vocab] of the token after them, or None where it was told to stop.

        Raises:
            EngineError: the engine failed; nothing is held then.
        """
        logits, start = None, 0
        while start < len(ids):
            if start and stopped is not None and stopped():
                return None
            piece = ids[start : start + chunk_after(len(self._tokens), self._chunks)]
            logits = self.read_at_once(piece)[-1]
            start += len(piece)
        return logits

    def read_at_once(self, ids: Sequence[int]) -> np.ndarray:
        """Read tokens in one run of the engine, as `read`; return the logits that the archive keeps [positions, vocab]."""
        session = self._session or self._open()
        # Until the engine has answered nobody knows what its state holds.
        self._session, tokens, self._tokens = None, self._tokens, []
        rows: np.ndarray = session.run([np.array([list(ids)], np.int64)])[0][0]
        self._session, self._tokens = session, [*tokens, *ids]
        return rows


class StreamedAnswer:
    """The text that follows some tokens: iterate over it, once."""

    def __init__(
        self,
        held: HeldTokens,
        ids: Sequence[int],
        choice: TokenChoice,
        limit: Limit,
        *,
        decode: Callable[[Sequence[int]], str],
        random: np.random.Generator,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Describe an answer; nothing is read before it is iterated over.

        Args:
            held: what the engine holds; the tokens of the answer are there afterwards, but for the last one.
            ids: the tokens to read first.
            choice: how a token is chosen.
            limit: most tokens.
            decode: makes tokens text.
            random: where draws come from.
            stopped: asked before each turn of the engine whether to end.
        """
        self._held, self._ids, self._choice, self._limit = held, ids, choice, limit
        self._decode, self._random, self._stopped = decode, random, stopped
        self._before = len(held.tokens)
        self._count, self._ending = 0, AnswerEnding.STOPPED
        self._times: list[float] = []
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """What has been said so far."""
        return "".join(self._text)

    @property
    def account(self) -> Account:
        """What it took so far; the last word when it has ended."""
        start, first, last = (*self._times, *self._times[-1:] * 2)[:3] if self._times else (0.0, 0.0, 0.0)
        return Account(self._before, len(self._ids), self._count, first - start, last - first, self._ending)

    def __iter__(self) -> Iterator[str]:
        """Yield pieces of text as they are final.

        Raises:
            EngineError: the engine failed.
        """
        pieces = text_pieces(self._decode, self._tokens())
        for piece in until_stop(pieces, self._choice.stops, self._found):
            self._text.append(piece)
            yield piece

    def _found(self, stop: str) -> None:
        del stop
        self._ending = AnswerEnding.STOP_TEXT

    def _tokens(self) -> Iterator[int]:
        self._times = [time.perf_counter()]
        for token in self._chosen():
            self._times[2:] = [time.perf_counter()]
            if token in self._choice.ends:
                self._ending = AnswerEnding.END_TOKEN
                return
            self._count += 1
            yield token
            if self._count == self._limit.tokens:
                self._ending = self._limit.ending
                return
            if self._stopped():
                return

    def _chosen(self) -> Iterator[int]:
        """Yield tokens without an end, or none where reading was stopped; note when the first one can be chosen."""
        logits = self._held.read(self._ids, self._stopped)
        self._times.append(time.perf_counter())
        given = len(self._held.tokens)
        while logits is not None:
            token = self._choice.next_token(logits, Said(self._held.tokens, given), self._random)
            yield token
            logits = self._held.read([token])


__all__ = ["Account", "AnswerEnding", "HeldTokens", "Limit", "StreamedAnswer"]

"""Tokens that a session of the engine has read, and can forget again from the end.

In: token ids. Out: logits of the positions read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from t2n_llm.check.runner import RewindableSession
from t2n_llm.graph.prefill import Chunks, chunk_after


class RewindableTokens:
    """A session of the engine, and the tokens that its caches hold."""

    def __init__(self, session: RewindableSession, chunks: Chunks) -> None:
        """Begin without a token.

        Args:
            session: a fresh one.
            chunks: how many tokens are fed at once.
        """
        self._session, self._chunks = session, chunks
        self._tokens: list[int] = []

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that are held, in order."""
        return self._tokens

    def read(self, ids: Sequence[int], stopped: Callable[[], bool] = lambda: False) -> np.ndarray | None:
        """Read tokens after those that are held, chunk by chunk.

        Args:
            ids: one or more.
            stopped: asked before each chunk after the first whether to go on.

        Returns:
            The logits [positions, vocab] that the archive keeps of the last chunk; None where it was told to stop.

        Raises:
            EngineError: the engine failed; the session is of no use any more.
        """
        rows, start = None, 0
        while start < len(ids):
            if start and stopped():
                return None
            piece = list(ids[start : start + chunk_after(len(self._tokens), self._chunks)])
            rows = self.read_at_once(piece)
            start += len(piece)
        return rows

    def read_at_once(self, ids: Sequence[int]) -> np.ndarray:
        """Read tokens in one run; see `read`."""
        logits: np.ndarray = self._session.run([np.array([list(ids)], np.int64)])[0][0]
        self._tokens += ids
        return logits

    def keep(self, count: int) -> None:
        """Forget all but the first tokens, so many; of those that are held, or more."""
        if count < len(self._tokens):
            self._session.keep(count)
            del self._tokens[count:]

    def continue_with(self, text: Sequence[int]) -> np.ndarray:
        """Hold a text, and read as few tokens of it as that takes; one at least.

        Args:
            text: one token or more.

        Returns:
            The logits [vocab] of the token after it.
        """
        same = next(
            (place for place, (ours, wanted) in enumerate(zip(self._tokens, text, strict=False)) if ours != wanted),
            min(len(self._tokens), len(text)),
        )
        self.keep(min(same, len(text) - 1))
        rows = self.read(text[len(self._tokens) :])
        assert rows is not None  # nobody stops it
        last: np.ndarray = rows[-1]
        return last


__all__ = ["RewindableTokens"]

"""Where requests wait for the one session of the model, first come, first served.

In: requests. Out: answers, one at a time; what the engine holds of the last one is read again by nobody who continues it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from t2n_llm.runtime.answering import StreamedAnswer
from t2n_llm.runtime.conversation_reader import ConversationReader, UnreadText
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.serve.requests import AskedText, RefusedRequestError


@dataclass(frozen=True)
class ServerLimits:
    """What one client may take.

    Attributes:
        request_bytes: of a request.
        new_tokens: of an answer; a request for more gets so many.
        seconds: of an answer, after its turn has come; it ends there.
        waiting: requests that wait for their turn; a further one is refused.
    """

    request_bytes: int = 1 << 20
    new_tokens: int = 2048
    seconds: float = 300.0
    waiting: int = 32


class RequestQueue:
    """The model, and the queue before it."""

    def __init__(self, model: ExportedModel, reader: ConversationReader, name: str, limits: ServerLimits) -> None:
        """Open it.

        Args:
            model: an export.
            reader: reads the conversations; nothing else may use it.
            name: what clients call the model.
            limits: of a client.
        """
        self.name, self.limits = name, limits
        self.opened = int(time.time())
        self._model, self._reader = model, reader
        self._lock = asyncio.Lock()  # hands the turn on in the order in which it was asked for
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, and have it in this block.

        Raises:
            RefusedRequestError: too many wait.
        """
        if self._waiting >= self.limits.waiting:
            raise RefusedRequestError(
                f"{self._waiting} requests are waiting; try again later.", status=429, code="rate_limit_exceeded"
            )
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    def answer(self, asked: AskedText, gone: Callable[[], bool]) -> StreamedAnswer:
        """Return the answer to a request; only within its turn.

        Args:
            asked: the request.
            gone: says whether nobody waits for it any more.

        Raises:
            OptionError: it does not fit into the model's longest context, the chat template refuses it, or a file cannot be read.
        """
        end = time.monotonic() + self.limits.seconds
        reading = self._reading(asked)
        most = min(asked.max_new_tokens or self.limits.new_tokens, self.limits.new_tokens)
        self._model.limit(reading.tokens, most)
        reading.start()
        return self._model.answer(
            self._reader.held,
            reading.left,
            asked.sampling.choice(self._model.settings),
            max_new_tokens=most,
            stopped=lambda: gone() or time.monotonic() > end,
        )

    def _reading(self, asked: AskedText) -> UnreadText:
        if asked.messages is not None:
            return self._reader.of_messages(asked.messages, asked.files, asked.variables)
        ids = self._model.encode(asked.prompt, chat=False) if isinstance(asked.prompt, str) else asked.prompt or []
        vocabulary = len(self._model.tokenizer)
        if any(token >= vocabulary for token in ids):
            raise RefusedRequestError(f"a prompt token is not below the vocabulary size {vocabulary}.", param="prompt")
        return self._reader.of_tokens(ids)


__all__ = ["RequestQueue", "ServerLimits"]

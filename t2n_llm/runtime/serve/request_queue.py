"""Where requests wait for the one session of the model, first come, first served.

In: requests. Out: answers, one at a time; what the engine holds of the last one is read again by nobody who continues it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

from t2n_llm.runtime.answering import HeldTokens, StreamedAnswer
from t2n_llm.runtime.chat.template import ChatTemplate
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

    def __init__(
        self, model: ExportedModel, held: HeldTokens, name: str, limits: ServerLimits, *, sanitized: bool = False
    ) -> None:
        """Open it.

        Args:
            model: an export.
            held: a session of it, used by nobody else.
            name: what clients call the model.
            limits: of a client.
            sanitized: whether special tokens in messages are encoded as ordinary text.
        """
        self.name, self.limits = name, limits
        self.opened = int(time.time())
        self._model, self._held, self._sanitized = model, held, sanitized
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
            OptionError: it does not fit into the model's longest context, or the chat template refuses it.
        """
        end = time.monotonic() + self.limits.seconds
        whole, left = self._to_read(asked)
        most = min(asked.max_new_tokens or self.limits.new_tokens, self.limits.new_tokens)
        self._model.limit(whole, most)
        if len(left) == whole:
            self._held.forget()
        return self._model.answer(
            self._held,
            left,
            asked.sampling.choice(self._model.settings),
            max_new_tokens=most,
            stopped=lambda: gone() or time.monotonic() > end,
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._model.tokenizer, self._model.folder, sanitized=self._sanitized)

    def _to_read(self, asked: AskedText) -> tuple[int, Sequence[int]]:
        """Return how many tokens a request has, and those that the engine does not hold."""
        held = self._held.tokens
        if asked.messages is not None:
            written = self._template.written(asked.messages, asked.variables)
            left = self._template.left_to_read(written, held)
            return (len(written.ids), written.ids) if left is None else (len(held) + len(left), left)
        ids = self._model.encode(asked.prompt, chat=False) if isinstance(asked.prompt, str) else asked.prompt or []
        vocabulary = len(self._model.tokenizer)
        if any(token >= vocabulary for token in ids):
            raise RefusedRequestError(f"a token of prompt is not below {vocabulary}.", param="prompt")
        continues = len(held) < len(ids) and list(ids[: len(held)]) == list(held)
        return len(ids), ids[len(held) :] if continues else ids


__all__ = ["RequestQueue", "ServerLimits"]

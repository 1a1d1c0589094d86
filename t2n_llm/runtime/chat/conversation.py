"""A conversation whose past the engine's state holds: a turn reads what is new, and all of it where the past is written anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from generic_export.errors import OptionError
from t2n_llm.runtime.answering import Account
from t2n_llm.runtime.chat.template import MediaFile, Message, content_of
from t2n_llm.runtime.conversation_reader import ConversationReader
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.choice import TokenChoice

MOST_NEW_TOKENS = 2048
"""Of an answer, where neither a user nor the model's settings say it."""


class HeldConversation:
    """Messages, and the engine that answers them."""

    def __init__(
        self,
        model: ExportedModel,
        reader: ConversationReader,
        choice: TokenChoice,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """Begin a conversation.

        Args:
            model: an export with a chat template.
            reader: reads its conversations.
            choice: how a token is chosen.
            system: what stands before the first turn.
            max_new_tokens: most tokens of an answer; None for what the model's settings say, or `MOST_NEW_TOKENS`.
        """
        self._model, self._reader, self._choice = model, reader, choice
        self._random = choice.random()
        self._most = max_new_tokens or int(model.settings.get("max_new_tokens") or MOST_NEW_TOKENS)
        self._begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._begin)
        self._files: list[Path] = []
        self._account: Account | None = None

    @property
    def messages(self) -> Sequence[Message]:
        """What was said, in order."""
        return tuple(self._messages)

    @property
    def account(self) -> Account | None:
        """What the last answer took; None before the first."""
        return self._account

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages, self._files = list(self._begin), []
        self._reader.held.forget()

    def ask(
        self, text: str, stopped: Callable[[], bool] = lambda: False, *, files: Sequence[MediaFile] = ()
    ) -> Iterator[str]:
        """Yield pieces of the answer to a user's message, and keep both.

        An answer that is stopped is kept as far as it was said; with nothing said the message is forgotten.

        Args:
            text: the message.
            stopped: asked before each turn of the engine whether to end.
            files: images or recordings that the message is about.

        Raises:
            OptionError: a file cannot be read, the template refuses the message, or it does not fit into the model's longest
                context; it is forgotten.
            EngineError: the engine failed; the message is forgotten.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": content_of(text, files)}]
        every = [*self._files, *(file.path for file in files)]
        ids = self._to_read(messages, every)
        answer = self._model.answer(
            self._reader.held, ids, self._choice, max_new_tokens=self._most, random=self._random, stopped=stopped
        )
        failed = False
        try:
            yield from answer
        except Exception:
            failed = True
            raise
        finally:
            self._account = answer.account
            if not failed and (answer.text or answer.account.ended):
                self._messages = [*messages, {"role": "assistant", "content": answer.text}]
                self._files = every

    def _to_read(self, messages: Sequence[Message], files: Sequence[Path]) -> Sequence[int]:
        """Return what the engine has to read; it forgets the past where the template writes that anew."""
        reading = self._reader.of_messages(messages, files)
        most = self._model.max_positions
        if most is not None and reading.tokens >= most:
            raise OptionError(
                f"the conversation has {reading.tokens} tokens, but the model's longest context is {most}.",
                "Start a new one (/reset), or send a shorter message.",
            )
        reading.start()
        return reading.left


__all__ = ["MOST_NEW_TOKENS", "HeldConversation"]

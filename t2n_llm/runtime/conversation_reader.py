"""What the engine has to read of a conversation: all of it, or what follows the tokens that it holds.

In: messages, or tokens. Out: `UnreadText`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from generic_export.errors import OptionError
from t2n_llm.runtime.answering import HeldTokens
from t2n_llm.runtime.chat.template import ChatTemplate, Message
from t2n_llm.runtime.generate import ExportedModel


@dataclass(frozen=True)
class UnreadText:
    """A text that the model is to answer.

    Attributes:
        tokens: how many it has.
        left: those that the engine does not hold.
        start: makes the engine ready to read them.
    """

    tokens: int
    left: Sequence[int]
    start: Callable[[], None]


class ConversationReader(Protocol):
    """Turns conversations into tokens for one session of the engine."""

    @property
    def held(self) -> HeldTokens:
        """The session."""

    def of_messages(
        self, messages: Sequence[Message], files: Sequence[Path | bytes], variables: Mapping[str, Any] | None = None
    ) -> UnreadText:
        """Read a chat.

        Args:
            messages: of the conversation.
            files: images or recordings, or their contents, in the order of the parts that stand for them.
            variables: of the chat template, before the reader's own.

        Raises:
            OptionError: the template refuses it, or the model cannot read a file.
        """

    def of_tokens(self, ids: Sequence[int]) -> UnreadText:
        """Read a text to continue."""


@dataclass(frozen=True)
class LanguageReader:
    """Reads the conversations of a language model.

    Attributes:
        model: an export.
        held: a session of the model that nothing else uses.
        variables: of the chat template.
        sanitized: whether special tokens in messages are encoded as ordinary text.
    """

    model: ExportedModel
    held: HeldTokens
    variables: Mapping[str, Any] | None = None
    sanitized: bool = False

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self.model.tokenizer, self.model.folder, self.variables, sanitized=self.sanitized)

    def of_messages(
        self, messages: Sequence[Message], files: Sequence[Path | bytes], variables: Mapping[str, Any] | None = None
    ) -> UnreadText:
        """See `ConversationReader`."""
        if files:
            raise OptionError(f"{self.model.folder} is a language model.", "It reads text only.")
        written = self._template.written(messages, variables)
        left = self._template.left_to_read(written, self.held.tokens)
        if left is None:
            return UnreadText(len(written.ids), written.ids, self.held.forget)
        return UnreadText(len(self.held.tokens) + len(left), left, _nothing)

    def of_tokens(self, ids: Sequence[int]) -> UnreadText:
        """See `ConversationReader`."""
        left = left_after(self.held.tokens, ids)
        return UnreadText(len(ids), ids, self.held.forget) if left is None else UnreadText(len(ids), left, _nothing)


def left_after(held: Sequence[int], ids: Sequence[int]) -> Sequence[int] | None:
    """Return the tokens that follow those that are held; None where they do not begin with those, or nothing follows."""
    continues = len(held) < len(ids) and list(ids[: len(held)]) == list(held)
    return ids[len(held) :] if continues else None


def _nothing() -> None:
    """Leave the engine as it is."""


__all__ = ["ConversationReader", "LanguageReader", "UnreadText", "left_after"]

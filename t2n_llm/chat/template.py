"""The turns of a chat as the model's own template writes them, and what of that the engine's state holds already.

In: messages, and the tokens that are held. Out: tokens to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Written:
    """A conversation up to where an answer begins.

    Attributes:
        text: as the template writes it.
        ids: its tokens, as transformers' `apply_chat_template` gives them.
    """

    text: str
    ids: Sequence[int]


@dataclass(frozen=True)
class ChatTemplate:
    """How a model's turns are written."""

    tokenizer: Any

    @staticmethod
    def of(tokenizer: Any, folder: Path) -> ChatTemplate:
        """Return the template of a tokenizer.

        Args:
            tokenizer: of the model.
            folder: where it was read, for the message.

        Raises:
            OptionError: it has none.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise OptionError(
                f"{folder}: the tokenizer has no chat template; the model may not be made for chats.",
                f"Continue texts with t2n-llm generate --raw, or put the model's chat_template.jinja into {folder}.",
            )
        return ChatTemplate(tokenizer)

    def written(self, messages: Sequence[Message]) -> Written:
        """Return a conversation that the model is to answer.

        Raises:
            OptionError: the template refuses it; some know no system message, or want turns that alternate.
        """
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            hint = (
                "Leave the system message out: some templates know none." if messages[0]["role"] == "system" else None
            )
            raise OptionError(f"the model's chat template refuses the conversation: {error}.", hint) from error
        return Written(text, self._ids(text))

    def left_to_read(self, written: Written, held: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens of a conversation after those that are held; None where it does not continue them.

        It does where its tokens begin with those that are held; and where its text does, though the model said it in other tokens
        than the tokenizer makes of it. A template that leaves out or rewrites what was said before is neither.
        """
        if len(held) < len(written.ids) and list(written.ids[: len(held)]) == list(held):
            return written.ids[len(held) :]
        said = self._text(held)
        same_text = written.text.startswith(said) and len(said) < len(written.text) and _REPLACEMENT not in said
        if not same_text or self._text(written.ids) != written.text:
            return None
        return self._from(written.text, len(said))

    def _from(self, text: str, place: int) -> Sequence[int] | None:
        """Return the tokens of a text from a character on; None where no token begins there."""
        if not self.tokenizer.is_fast:
            return None
        read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = read["offset_mapping"]
        first = next((number for number, (start, _) in enumerate(spans) if start >= place), None)
        if first is None or spans[first][0] != place or any(end > place for _, end in spans[:first]):
            return None
        return [int(each) for each in read["input_ids"][first:]]

    def _ids(self, text: str) -> list[int]:
        return [int(each) for each in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


__all__ = ["ChatTemplate", "Message", "Written"]

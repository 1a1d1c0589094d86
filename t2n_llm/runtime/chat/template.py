"""The turns of a chat as the model's own template writes them, and what of that the engine's state holds already.

In: messages, and the tokens that are held. Out: tokens to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError
from t2n_llm.runtime.chat.template_process import TemplateProcess

Message = Mapping[str, Any]
"""`role` (system, user, assistant) and `content`: text, or a list of parts such as `{"type": "image"}` and text."""


@dataclass(frozen=True)
class MediaFile:
    """A file that a message is about.

    Attributes:
        kind: "image" or "audio".
        path: of the file.
    """

    kind: str
    path: Path


def content_of(text: str, files: Sequence[MediaFile]) -> str | list[dict[str, str]]:
    """Return the content of a message: its text, after a part for each file."""
    if not files:
        return text
    return [*({"type": file.kind, file.kind: str(file.path)} for file in files), {"type": "text", "text": text}]


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FOR_TOOLS = ("tool_use", "rag")  # names that transformers gives to templates of other uses
_OF_CONVERSATION = ("messages", "add_generation_prompt")


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
    """How a model's turns are written.

    Attributes:
        tokenizer: of the model.
        folder: where it was read, for messages.
        variables: that the template reads, such as `enable_thinking`.
        sanitized: whether special tokens in messages are encoded as ordinary text.
    """

    tokenizer: Any
    folder: Path
    variables: Mapping[str, Any] = field(default_factory=dict)
    sanitized: bool = False
    _process: TemplateProcess = field(default_factory=TemplateProcess, compare=False, repr=False)

    @staticmethod
    def of(
        tokenizer: Any, folder: Path, variables: Mapping[str, Any] | None = None, *, sanitized: bool = False
    ) -> ChatTemplate:
        """Return the template of a tokenizer.

        Args:
            tokenizer, folder, variables, sanitized: see the attributes.

        Raises:
            OptionError: it has none, or several and none is the default; or a variable belongs to the conversation.
        """
        if sanitized and not _can_sanitize(tokenizer):
            raise OptionError(
                f"{folder}: transformers cannot encode special tokens in messages as text with this tokenizer.",
                "Use transformers 5.24 or newer and a fast tokenizer (tokenizer.json).",
            )
        template = ChatTemplate(tokenizer, folder, template_variables(variables or {}), sanitized)
        template._source()
        return template

    def written(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> Written:
        """Return a conversation that the model is to answer.

        Args:
            messages: of the conversation.
            variables: for this one, before those of the template.

        Raises:
            OptionError: the template fails, takes too much, or refuses it; some know no system message, or want turns that
                alternate.
        """
        source, given = self._source(), {**self.variables, **(variables or {})}
        variables = {**self.tokenizer.special_tokens_map, **given}
        text = self._process.render(source, messages, variables=variables, named=list(given))
        if self.sanitized:  # transformers compiles the template here, so only now: within the limits it did compile
            text = self._process.render(source, self._marked(source, messages), variables=variables)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise OptionError("the model's chat template produces a lone surrogate.", "Correct the template.")
        return Written(text, self._ids(text))

    def _source(self) -> str:
        """Return the template; of several, the default one, or the one that is for plain chats."""
        found = getattr(self.tokenizer, "chat_template", None)
        if not found:
            raise OptionError(
                f"{self.folder}: the tokenizer has no chat template; the model may not support chats.",
                f"Use t2n-llm generate --raw, or add the model's chat_template.jinja to {self.folder}.",
            )
        if isinstance(found, Mapping):
            plain = [name for name in found if name not in _FOR_TOOLS]
            name = "default" if "default" in found else plain[0] if len(plain) == 1 else None
            if name is None:
                raise OptionError(
                    f"{self.folder}: the tokenizer has the chat templates {', '.join(map(str, found))}, but no "
                    "default.",
                    f"Write the right one to {self.folder / 'chat_template.jinja'}.",
                )
            found = found[name]
        if not isinstance(found, str):
            raise OptionError(
                f"{self.folder}: the tokenizer's chat template is not text.", "Correct tokenizer_config.json."
            )
        return found

    def _marked(self, source: str, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose special tokens are marked as transformers marks them, for `_ids`."""
        from t2n_llm.compat import mark_special_tokens  # torch

        return mark_special_tokens(self.tokenizer, source, messages)

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
        if not self.sanitized:
            return [int(each) for each in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        try:
            read = self.tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)
        except ValueError as error:
            raise OptionError(
                f"a special token in a message cannot be encoded as text: {error}.", "Remove it."
            ) from error
        return [int(each) for each in read["input_ids"]]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _can_sanitize(tokenizer: Any) -> bool:
    from t2n_llm.compat import marks_special_tokens  # torch

    return marks_special_tokens(tokenizer)


def template_variables(given: Any) -> dict[str, Any]:
    """Return variables for a template.

    Raises:
        OptionError: they are no table by name, or one is of the conversation itself.
    """
    if not isinstance(given, Mapping):
        raise OptionError("template variables are not a JSON object.", 'Pass them by name: {"enable_thinking": false}.')
    for name in _OF_CONVERSATION:
        if name in given:
            raise OptionError(f"the template variable {name} is set by the conversation.", "Omit it.")
    return dict(given)


__all__ = ["ChatTemplate", "Message", "Written", "template_variables"]

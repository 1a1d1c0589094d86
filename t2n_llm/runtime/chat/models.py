"""A model that chats: one that reads text, or one that sees or hears as well.

In: an export folder. Out: what makes its answers, and what reads its conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError
from t2n_llm.export.folder import read_any_manifest
from t2n_llm.runtime.chat.template import ChatTemplate
from t2n_llm.runtime.conversation_reader import ConversationReader, LanguageReader
from t2n_llm.runtime.generate import ExportedModel, export_folder
from t2n_llm.runtime.multimodal import MultimodalModel
from t2n_llm.tasks.names import MULTIMODAL, recorded_task


@dataclass(frozen=True)
class ChatModel:
    """An export folder that `chat` and `serve` open.

    Attributes:
        language: makes answers.
        sensing: reads images or sound; None for a language model.
    """

    language: ExportedModel
    sensing: MultimodalModel | None = None

    @staticmethod
    def open(path: Path, *, device: str = "cpu", prefill_chunk: int | None = None) -> ChatModel:
        """Open an export folder.

        Args:
            path, device, prefill_chunk: see `ExportedModel.open`.

        Raises:
            OptionError: the device is unknown, `prefill_chunk` is below 1, or the model does not chat.
            ArchiveError: the path is no export folder, or it lacks a file.
            MissingTokenizerError: the folder has no tokenizer.
            MissingExtraError: the processor needs a package that is not installed.
        """
        folder = export_folder(path)
        if recorded_task(read_any_manifest(folder)) in MULTIMODAL:
            sensing = MultimodalModel.open(folder, device=device, prefill_chunk=prefill_chunk)
            return ChatModel(sensing.language, sensing)
        return ChatModel(ExportedModel.open(path, device=device, prefill_chunk=prefill_chunk))

    @property
    def reads(self) -> str | None:
        """What messages may be about besides text: "image" or "audio"."""
        return None if self.sensing is None else self.sensing.reads

    def require_template(self, variables: Mapping[str, Any] | None = None, *, sanitized: bool = False) -> None:
        """Refuse a model whose chats cannot be written.

        Raises:
            OptionError: it has no chat template, or special tokens cannot be encoded as text.
        """
        if sanitized and self.sensing is not None:
            raise OptionError(
                "--sanitize-special-tokens is not supported for models that read images or audio.",
                "Omit it: a message whose image tokens do not match its files is refused.",
            )
        ChatTemplate.of(self.language.tokenizer, self.language.folder, variables, sanitized=sanitized)

    @contextmanager
    def reader(
        self, variables: Mapping[str, Any] | None = None, *, sanitized: bool = False
    ) -> Iterator[ConversationReader]:
        """Yield what reads conversations; the engine ends with the `with` block.

        Args:
            variables: of the chat template.
            sanitized: whether special tokens in messages are encoded as ordinary text.

        Raises:
            EngineError: the engine refused an archive.
        """
        if self.sensing is not None:
            with self.sensing.conversing(variables) as reader:
                yield reader
        else:
            with self.language.opened() as held:
                yield LanguageReader(self.language, held, variables, sanitized)


__all__ = ["ChatModel"]

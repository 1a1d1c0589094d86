"""Text about images or sound, through the three archives of a multimodal export in tract.

In: an export folder, a prompt and files. Out: what `StreamedAnswer` needs. Tokens and pixels are made by transformers' processor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.devices import check_device
from generic_export.errors import OptionError
from kvcache.states.tensors import StateTensor
from t2n_llm.check.options import EngineOptions
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.export.manifest_form import require_said
from t2n_llm.export.recorded import graph_options_of
from t2n_llm.graph.interface import recorded_states
from t2n_llm.graph.prefill import Chunks, chunks_of
from t2n_llm.runtime.answering import HeldTokens
from t2n_llm.runtime.chat.template import ChatTemplate, MediaFile, Message, content_of
from t2n_llm.runtime.conversation_reader import UnreadText, left_after
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.settings import generation_settings
from t2n_llm.tasks.multimodal.family import TOKEN_TYPES, Family
from t2n_llm.tasks.multimodal.model import DECODER, EMBED
from t2n_llm.tasks.multimodal.processor import MultimodalPrompt, PromptProcessor, kind_of, row_counts
from t2n_llm.tasks.multimodal.running import MultimodalText, Pipeline, open_pipeline


@dataclass(frozen=True)
class MultimodalModel:
    """An export folder of a model that sees or hears.

    Attributes:
        language: what it shares with a language model: tokenizer, settings, limits.
        processor: makes prompts.
        archives: by role.
        states: of the decoder.
    """

    language: ExportedModel
    processor: PromptProcessor
    archives: Mapping[str, Path]
    states: tuple[StateTensor, ...]

    @staticmethod
    def open(folder: Path, *, device: str = "cpu", prefill_chunk: int | None = None) -> MultimodalModel:
        """Open an export folder.

        Args:
            folder: made by `t2n-llm export`, for `image-text-to-text` or `audio-text-to-text`.
            device: "cpu", "cuda" or "metal".
            prefill_chunk: prompt tokens per call; None for the numbers recorded in the export.

        Raises:
            OptionError: the device is unknown, or `prefill_chunk` is below 1.
            ArchiveError: it is no export folder, or lacks its config or its processor.
            MissingExtraError: the processor needs a package that is not installed.
        """
        check_device(device)
        if prefill_chunk is not None and prefill_chunk < 1:
            raise OptionError(f"prefill_chunk is {prefill_chunk}.", "Use 1 or more.")
        manifest = read_manifest(folder)
        require_said(folder, manifest, ["multimodal", *(f"archives.{role}" for role in (EMBED, DECODER))])
        processor = PromptProcessor.of_export(folder, manifest, graph_options_of(manifest).image_size)
        language = ExportedModel(
            folder=folder,
            archive=archive_in(folder, manifest),
            tokenizer=processor.tokenizer,
            settings=generation_settings(folder),
            max_positions=manifest["model"].get("max_position_embeddings"),
            prefill=chunks_of(manifest) if prefill_chunk is None else [(0, prefill_chunk)],
            device=device,
            never=(processor.family.image_token_id,),
        )
        archives = {role: folder / part["archive"] for role, part in manifest["archives"].items()}
        return MultimodalModel(language, processor, archives, recorded_states(manifest))

    def prompt(
        self,
        text: str,
        *,
        images: Sequence[Path] = (),
        audio: Sequence[Path] = (),
        system: str | None = None,
        chat: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> MultimodalPrompt:
        """Return a prompt about files.

        Args:
            text: of the user.
            images, audio: files, in the order in which the model reads them, before the text.
            system: what the model is told before.
            chat: apply the chat template, if the model has one.
            variables: of the chat template.

        Raises:
            OptionError: the model does not read such files, one cannot be read, or the chat template failed.
        """
        hears = self._family.medium.hears
        if (images and hears) or (audio and not hears):
            raise OptionError(
                f"{self.language.folder} was exported for {self._family.medium.task}.",
                f"It takes a prompt and {'--audio FILE.wav' if hears else '--image FILE'}.",
            )
        files = [*(MediaFile("image", file) for file in images), *(MediaFile("audio", file) for file in audio)]
        if chat and (self.language.has_chat_template or variables or system is not None):
            before = [] if system is None else [{"role": "system", "content": system}]
            template = ChatTemplate.of(self.language.tokenizer, self.language.folder, variables)
            text = template.written([*before, {"role": "user", "content": content_of(text, files)}]).text
        else:
            text = self.processor.marked(text, len(files))
        return self.processor.prompt(text, images, audio)

    @property
    def reads(self) -> str:
        """What prompts may be about: "image" or "audio"."""
        return kind_of(self._family)

    @contextmanager
    def opened(self, prompt: MultimodalPrompt) -> Iterator[HeldTokens]:
        """Yield what reads a prompt, whose images have been seen; the engine ends with the `with` block.

        Raises:
            EngineError: the engine refused an archive, or failed.
        """
        with self._pipeline() as pipeline:
            whole = prompt.images or self._family.bidirectional_prompts
            chunks = self._chunks if whole else self.language.prefill
            yield HeldTokens(lambda: pipeline.begin(prompt.ids, prompt.images, prompt.frames), chunks)

    @contextmanager
    def conversing(self, variables: Mapping[str, Any] | None = None) -> Iterator[MultimodalReader]:
        """Yield what reads conversations; the engine ends with the `with` block.

        Args:
            variables: of the chat template.

        Raises:
            OptionError: the model has no chat template.
            EngineError: the engine refused an archive.
        """
        template = ChatTemplate.of(self.language.tokenizer, self.language.folder, variables)
        with self._pipeline() as pipeline:
            yield MultimodalReader(self.processor, pipeline, template, self._chunks)

    @contextmanager
    def _pipeline(self) -> Iterator[Pipeline]:
        engine = EngineOptions(device=self.language.device)
        with open_pipeline(self.archives, self._family, self.states, engine) as pipeline:
            yield pipeline

    @property
    def _chunks(self) -> Chunks:
        """How many tokens are read at once; an image that is read in both directions must be in one call."""
        return [(0, sys.maxsize)] if self._family.decoder_input == TOKEN_TYPES else self.language.prefill

    @property
    def _family(self) -> Family:
        return self.processor.family


class MultimodalReader:
    """Reads conversations about files: see `ConversationReader`. Images that the engine has read are not looked at again."""

    def __init__(self, processor: PromptProcessor, pipeline: Pipeline, template: ChatTemplate, chunks: Chunks) -> None:
        """Begin with an empty text.

        Args:
            processor, template: of the export.
            pipeline: its archives.
            chunks: how many tokens are read at once.
        """
        self._processor, self._pipeline, self._template = processor, pipeline, template
        self._prompt = MultimodalPrompt((), ())
        self.held = HeldTokens(self._begin, chunks)

    def of_messages(
        self, messages: Sequence[Message], files: Sequence[Path | bytes], variables: Mapping[str, Any] | None = None
    ) -> UnreadText:
        """See `ConversationReader`."""
        family = self._processor.family
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        kinds = {part["type"] for content in contents for part in content}
        other = kinds - {"text", kind_of(family)}
        if other:
            raise OptionError(f"the model was exported for {family.medium.task}.", f"It does not read {other.pop()}.")
        text = self._template.written(messages, variables).text
        images, audio = ((), files) if family.medium.hears else (files, ())
        return self._reading(self._processor.prompt(text, images, audio))

    def of_tokens(self, ids: Sequence[int]) -> UnreadText:
        """See `ConversationReader`."""
        if self._processor.family.image_token_id in ids:
            raise OptionError("the prompt has the token that stands for an image.", "Send images in a chat.")
        return self._reading(MultimodalPrompt(tuple(ids), ()))

    def _reading(self, prompt: MultimodalPrompt) -> UnreadText:
        family, items = self._processor.family, self._items_read()
        # The engine is told the images for cross-attention before the first token.
        anew = family.bidirectional_prompts or (bool(family.cross_layers) and len(prompt.images) != items)
        left = None if anew else left_after(self.held.tokens, prompt.ids)
        # Without tokens there may be no session either: the engine failed, and its text ended with it.
        if not self.held.tokens or left is None or items is None or not self._has_seen(prompt, items):
            return UnreadText(len(prompt.ids), prompt.ids, partial(self._start, prompt))
        return UnreadText(len(prompt.ids), left, partial(self._continue, prompt, items))

    def _items_read(self) -> int | None:
        """Return how many images the engine has read; None where it ended within one."""
        family = self._processor.family
        rows = list(self.held.tokens).count(family.image_token_id)
        ends = [0, *accumulate(row_counts(family, self._prompt.images, self._prompt.frames))]
        return ends.index(rows) if rows in ends else None

    def _has_seen(self, prompt: MultimodalPrompt, items: int) -> bool:
        """Say whether the first images of a prompt are those that the engine has read."""
        pairs = zip(prompt.images, self._prompt.images, strict=False)
        return (
            len(prompt.images) >= items
            and prompt.frames[:items] == self._prompt.frames[:items]
            and all(np.array_equal(new, old) for new, old in islice(pairs, items))
        )

    def _start(self, prompt: MultimodalPrompt) -> None:
        self.held.forget()
        self._continue(prompt, 0)

    def _continue(self, prompt: MultimodalPrompt, items: int) -> None:
        self._prompt = prompt
        rows = self._pipeline.encode(prompt.images[items:], prompt.frames[items:])
        self._text.expect(prompt.ids, rows, [image.shape for image in prompt.images])

    def _begin(self) -> MultimodalText:
        self._text = self._pipeline.begin((), ())
        return self._text


__all__ = ["MultimodalModel", "MultimodalReader"]

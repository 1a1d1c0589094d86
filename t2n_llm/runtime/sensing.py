"""Text about images or sound, through the three archives of a multimodal export in tract.

In: an export folder, a prompt and files. Out: what `StreamedAnswer` needs. Tokens and pixels are made by transformers' processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from generic_export.devices import check_device
from generic_export.errors import ArchiveError, OptionError
from kvcache.states.tensors import StateTensor
from t2n_llm.check.options import EngineOptions
from t2n_llm.export.folder import archive_in, read_manifest
from t2n_llm.export.manifest_form import require_said
from t2n_llm.export.recorded import graph_options_of
from t2n_llm.graph.interface import recorded_states
from t2n_llm.graph.prefill import chunks_of
from t2n_llm.runtime.answering import HeldTokens
from t2n_llm.runtime.chat.template import ChatTemplate
from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.choice import TokenChoice
from t2n_llm.runtime.sampling.rules import Suppressed
from t2n_llm.runtime.sampling.settings import generation_settings
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.family import SOUND, TOKEN_TYPES, Family
from t2n_llm.tasks.multimodal.model import DECODER, EMBED
from t2n_llm.tasks.multimodal.processor import PromptProcessor, SensedPrompt
from t2n_llm.tasks.multimodal.running import open_pipeline
from t2n_llm.tasks.names import recorded_task


@dataclass(frozen=True)
class SensingModel:
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
    def open(folder: Path, *, device: str = "cpu", prefill_chunk: int | None = None) -> SensingModel:
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
        config = _config_of(folder)
        family = family_of(config, graph_options_of(manifest).image_size, recorded_task(manifest))
        _require_same(folder, manifest["multimodal"], family, config)
        processor = PromptProcessor.of(folder, family, config)
        language = ExportedModel(
            folder=folder,
            archive=archive_in(folder, manifest),
            tokenizer=processor.tokenizer,
            settings=generation_settings(folder),
            max_positions=manifest["model"].get("max_position_embeddings"),
            prefill=chunks_of(manifest) if prefill_chunk is None else [(0, prefill_chunk)],
            device=device,
        )
        archives = {role: folder / part["archive"] for role, part in manifest["archives"].items()}
        return SensingModel(language, processor, archives, recorded_states(manifest))

    def prompt(
        self,
        text: str,
        *,
        images: Sequence[Path] = (),
        audio: Sequence[Path] = (),
        system: str | None = None,
        chat: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> SensedPrompt:
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
        hears = self._family.medium is SOUND
        if (images and hears) or (audio and not hears):
            raise OptionError(
                f"{self.language.folder} was exported for {self._family.medium.task}.",
                f"It takes a prompt and {'--audio FILE.wav' if hears else '--image FILE'}.",
            )
        files = [
            *({"type": "image", "image": "image"} for _ in images),
            *({"type": "audio", "audio": "audio"} for _ in audio),
        ]
        if chat and (self.language.has_chat_template or variables or system is not None):
            content = [*files, {"type": "text", "text": text}] if files else text
            before = [] if system is None else [{"role": "system", "content": system}]
            template = ChatTemplate.of(self.language.tokenizer, self.language.folder, variables)
            text = template.written([*before, {"role": "user", "content": content}]).text
        else:
            text = self.processor.marked(text, len(files))
        return self.processor.prompt(text, images, audio)

    @contextmanager
    def opened(self, prompt: SensedPrompt) -> Iterator[HeldTokens]:
        """Yield what reads a prompt, whose images have been seen; the engine ends with the `with` block.

        Raises:
            EngineError: the engine refused an archive, or failed.
        """
        # An image that is read in both directions must be in one call.
        whole = self._family.decoder_input == TOKEN_TYPES and len(prompt.pixels)
        chunks = [(0, len(prompt.ids))] if whole else self.language.prefill
        engine = EngineOptions(device=self.language.device)
        with open_pipeline(self.archives, self._family, self.processor.config, self.states, engine) as pipeline:
            yield HeldTokens(lambda: pipeline.begin(prompt.ids, prompt.pixels, prompt.frames), chunks)

    def without_placeholders(self, choice: TokenChoice) -> TokenChoice:
        """Return a choice that never says the token of an image: the archives have no embedding of it."""
        token = self._family.image_token_id(self.processor.config)
        return replace(choice, rules=(*choice.rules, Suppressed((token,))))

    @property
    def _family(self) -> Family:
        return self.processor.family


def _config_of(folder: Path) -> Any:
    """Return the transformers config of an export, which says how images are placed.

    Raises:
        ArchiveError: there is none, or transformers does not know it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers raises for a file that it does not know
        raise ArchiveError(
            f"{folder}: transformers cannot read its config.json, which generate needs for images and sound.",
            "Export the model again with a transformers release that knows it; models with code of their own are not supported.",
        ) from error


def _require_same(folder: Path, recorded: Mapping[str, Any], family: Family, config: Any) -> None:
    """Refuse an export whose archives take images in another form than this transformers makes them.

    Raises:
        ArchiveError: names both forms.
    """
    medium = family.medium
    shape = [*(["N"] if family.stacks_images else []), *family.pixel_shape(config)]
    said = recorded.get(medium.input_name, {}).get("shape")
    if said != shape or recorded.get(f"rows_per_{medium.noun}") != family.rows_per_image(config):
        raise ArchiveError(
            f"{folder}: its archive takes {medium.input_name} of shape {said}; with this transformers release the model "
            f"takes {shape}.",
            "Export the model again, or install the transformers release of the export.",
        )


__all__ = ["SensingModel"]

"""A prompt with images or sound as transformers' own processor makes it, in the form that the archives take.

In: an export folder, a text, files. Out: tokens and pixels; or an error that says what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import ArchiveError, MissingExtraError, OptionError, described
from t2n_llm.tasks.media.encoder_input import read_image
from t2n_llm.tasks.media.sound import read_waveform
from t2n_llm.tasks.multimodal.families import family_of
from t2n_llm.tasks.multimodal.family import FRAME_MASK, Family
from t2n_llm.tasks.multimodal.processed import items_of
from t2n_llm.tasks.multimodal.task import archive_shape
from t2n_llm.tasks.names import recorded_task

_HEARS = ("feature_extractor", "audio_processor")
_READERS = ("image_processor", *_HEARS)


@dataclass(frozen=True)
class MultimodalPrompt:
    """A prompt, ready for `Pipeline.begin`.

    Attributes:
        ids: its tokens, an image's as often as it has rows.
        images: f32, each as the archive takes it.
        frames: of its segments, where `Family.masked`.
    """

    ids: tuple[int, ...]
    images: tuple[np.ndarray, ...]
    frames: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptProcessor:
    """The processor of an export.

    Attributes:
        folder: of the export.
        processor: transformers'.
        family: of the model.
    """

    folder: Path
    processor: Any
    family: Family

    @staticmethod
    def of(folder: Path, family: Family) -> PromptProcessor:
        """Load the processor of a folder.

        Raises:
            MissingExtraError: it needs a package that is not installed.
            ArchiveError: the folder has none, or transformers cannot build it.
        """
        from transformers import AutoProcessor

        hint = "Export a checkpoint that includes its tokenizer and preprocessor_config.json or processor_config.json."
        try:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except ImportError as error:
            raise MissingExtraError(
                f"{folder}: the processor of this model needs a package that is not installed: {described(error)}",
                "Install it; most need pip install torchvision 't2n-llm[images]'.",
            ) from error
        except Exception as error:  # whatever a processor raises for files that it cannot read
            raise ArchiveError(
                f"{folder}: transformers cannot build its processor: {described(error)}", hint
            ) from error
        if not any(hasattr(processor, name) for name in _READERS) or not hasattr(processor, "tokenizer"):
            raise ArchiveError(f"{folder}: it has no processor of {family.medium.noun}s.", hint)
        return PromptProcessor(folder, processor, family)

    @staticmethod
    def of_export(folder: Path, manifest: Mapping[str, Any], image_size: int | None) -> PromptProcessor:
        """Load the processor of an export, whose archives take what it makes.

        Args:
            folder: of the export.
            manifest: its `export.json`.
            image_size: that it was exported for; None where the model has its own.

        Raises:
            MissingExtraError: it needs a package that is not installed.
            ArchiveError: transformers cannot read the config or the processor, or makes images in another form.
        """
        family = family_of(_config_of(folder), image_size, recorded_task(manifest), folder=folder)
        _require_same(folder, manifest["multimodal"], family)
        return PromptProcessor.of(folder, family)

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer, with its chat template."""
        tokenizer = self.processor.tokenizer
        tokenizer.chat_template = getattr(self.processor, "chat_template", None) or tokenizer.chat_template
        return tokenizer

    def marked(self, text: str, count: int) -> str:
        """Return a text that stands for itself, after the token of each image that it does not mention."""
        token = getattr(self.processor, f"{kind_of(self.family)}_token", None)
        return text if not token or token in text else token * count + text

    def prompt(self, text: str, images: Sequence[Path | bytes], audio: Sequence[Path | bytes]) -> MultimodalPrompt:
        """Return what the archives read.

        Args:
            text: with the token of each image or recording, as a chat template writes it.
            images: files or their contents; they get the size that the model was exported for.
            audio: WAV files or their contents.

        Raises:
            OptionError: a file cannot be read, the processor refuses the text, or makes of a file what the archive does not take.
        """
        given = {**self._seen(images), **self._heard(audio)}
        opening = self.tokenizer.bos_token
        if opening is not None and text.startswith(opening):  # as transformers' apply_chat_template does
            given["add_special_tokens"] = False
        try:
            made = self.processor(text=text, return_tensors="pt", **given)
        except Exception as error:  # processors raise exceptions of any type
            kind = kind_of(self.family)
            raise OptionError(
                f"the model's processor refuses the prompt: {described(error)}",
                f"Write one {kind} token in the prompt for each file, or omit --raw; some models need a file.",
            ) from error
        ids = tuple(int(token) for token in np.asarray(made["input_ids"]).reshape(-1))
        items = items_of(made, self.family)
        mask = made.get(FRAME_MASK) if self.family.masked else None
        frames = () if mask is None else tuple(int(count) for count in np.asarray(mask).sum(axis=1))
        self._check_rows(ids, items, frames)
        return MultimodalPrompt(ids, items, frames)

    def _seen(self, files: Sequence[Path | bytes]) -> dict[str, Any]:
        if not files:
            return {}
        side = self.family.image_side()
        arrays = [read_image(file, None if side is None else (side, side)) for file in files]
        from PIL import Image

        return {"images": [Image.fromarray(array) for array in arrays]}

    def _heard(self, files: Sequence[Path | bytes]) -> dict[str, Any]:
        if not files:
            return {}
        extractor = next(getattr(self.processor, name) for name in _HEARS if hasattr(self.processor, name))
        rate, most = int(extractor.sampling_rate), getattr(extractor, "n_samples", None)
        waveforms = [read_waveform(file, rate) for file in files]
        whole = not self.family.free_axes and bool(self.family.known([self.family.pixel_shape]))
        for file, waveform in zip(files, waveforms, strict=True):
            if most is not None and len(waveform) > most and (whole or self.family.masked):
                name = "audio" if isinstance(file, bytes) else file
                raise OptionError(
                    f"{name}: {len(waveform) / rate:.1f} s long, and the model hears {most / rate:g} s.",
                    "Cut the recording into pieces.",
                )
        if whole and most is not None:  # the archive hears whole segments: silence fills them up
            waveforms = [np.pad(waveform, (0, most - len(waveform))) for waveform in waveforms]
        return {"audio": waveforms, "sampling_rate": rate}

    def _check_rows(self, ids: Sequence[int], images: Sequence[np.ndarray], frames: Sequence[int]) -> None:
        """Refuse a prompt whose tokens are not as many as the rows of its images.

        Raises:
            OptionError: says both counts.
        """
        family = self.family
        tokens = ids.count(family.image_token_id)
        each = row_counts(family, images, frames)
        if tokens != sum(each):
            raise OptionError(
                f"the prompt has {tokens} {kind_of(self.family)} tokens, but the files become {sum(each)} rows "
                f"({' + '.join(map(str, each)) or 'there is none'}).",
                f"Write one {kind_of(self.family)} token in the prompt for each file, or omit --raw.",
            )


def row_counts(family: Family, images: Sequence[np.ndarray], frames: Sequence[int] = ()) -> tuple[int, ...]:
    """Return how many rows each image or segment becomes.

    Args:
        family: of the model.
        images: as the archive takes them.
        frames: of the segments before their ends, where `Family.masked`.
    """
    if frames:
        return tuple(family.rows_of(count) for count in frames)
    return tuple(family.rows_of_image(image.shape) for image in images)


def kind_of(family: Family) -> str:
    """Return what chat templates call the files that a model reads: "image" or "audio"."""
    return "audio" if family.medium.hears else "image"


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


def _require_same(folder: Path, recorded: Mapping[str, Any], family: Family) -> None:
    """Refuse an export whose archives take images in another form than this transformers makes them.

    Raises:
        ArchiveError: names both forms.
    """
    medium = family.medium
    shape = archive_shape(family)
    said = recorded.get(medium.input_name, {}).get("shape")
    if said != shape or recorded.get(f"rows_per_{medium.noun}") != family.row_count:
        raise ArchiveError(
            f"{folder}: its archive takes {medium.input_name} of shape {said}; with this transformers release the model "
            f"takes {shape}.",
            "Export the model again, or install the transformers release of the export.",
        )


__all__ = ["MultimodalPrompt", "PromptProcessor", "kind_of", "row_counts"]

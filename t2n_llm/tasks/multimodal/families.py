"""Which family a config is of, and models that hear: how segments of sound become rows of embeddings.

In: a transformers config. Out: its `Family`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from generic_export.errors import OptionError, UnknownArchitectureError
from t2n_llm.tasks.heads.image_size import processed_size
from t2n_llm.tasks.models import TASK_MODELS, classes_of
from t2n_llm.tasks.multimodal.cross_attention import Mllama
from t2n_llm.tasks.multimodal.family import (
    FRAME_MASK,
    IMAGES,
    SOUND,
    BaseFamily,
    Encoder,
    Family,
    Medium,
)
from t2n_llm.tasks.multimodal.features import feature_family
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT

_FRAMES_PER_POSITION = 2  # the encoder's second convolution has a stride of 2


@dataclass(frozen=True)
class _Whisper(BaseFamily):
    """What speech models with an encoder like Whisper's have in common."""

    medium: ClassVar[Medium] = SOUND

    config: Any
    decoder_input: str | None = None
    stacks_images: bool = True

    @property
    def image_token_id(self) -> int:
        """See `Family`."""
        return int(self.config.audio_token_id)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """See `Family`: log-mel features and frames of a segment."""
        audio = self.config.audio_config
        return int(audio.num_mel_bins), int(audio.max_source_positions * _FRAMES_PER_POSITION)

    def reference_inputs(self, is_image: torch.Tensor, images: Sequence[torch.Tensor]) -> dict[str, Any]:
        """See `Family`."""
        del is_image
        return {"input_features": torch.stack(tuple(images))} if images else {}


@dataclass(frozen=True)
class Voxtral(_Whisper):
    """Voxtral: segments of 30 seconds, the last one padded with silence, which is heard; neighbouring positions joined."""

    @property
    def rows_per_image(self) -> int:
        """See `Family`."""
        audio = self.config.audio_config
        return int(audio.max_source_positions * audio.hidden_size // audio.intermediate_size)

    def encoder(self, network: Any) -> Encoder:
        """See `Family`; the rows of each segment stay apart."""
        model, rows = network.model, self.rows_per_image
        width = network.config.audio_config.intermediate_size

        def encode(features: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            del buffers
            heard = model.audio_tower(features, return_dict=True).last_hidden_state
            return (model.multi_modal_projector(heard.reshape(-1, rows, width)),)

        return Encoder({}, encode)


@dataclass(frozen=True)
class Qwen2Audio(_Whisper):
    """Qwen2-Audio: recordings of up to 30 seconds, what is beyond their end hidden; neighbouring positions averaged."""

    masked: ClassVar[bool] = True

    @property
    def rows_per_image(self) -> int:
        """See `Family`: those of a whole segment."""
        return self.rows_of(self.pixel_shape[-1])

    def rows_of(self, frames: int) -> int:
        """See `Family`; a recording ends with its last whole row."""
        return (frames + 1) // _FRAMES_PER_POSITION // 2

    def encoder(self, network: Any) -> Encoder:
        """See `Family`; a position that covers a frame of the recording is seen."""
        model = network.model
        positions = network.config.audio_config.max_source_positions

        def encode(features: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            seen = buffers[FRAME_MASK][:, None, None, ::_FRAMES_PER_POSITION] > 0
            mask = seen.expand(-1, 1, positions, positions)
            heard = model.audio_tower(features, attention_mask=mask, return_dict=True).last_hidden_state
            return (model.multi_modal_projector(heard),)

        return Encoder({}, encode)


_FAMILIES: Mapping[str, Callable[[Any], Family]] = {"voxtral": Voxtral, "qwen2_audio": Qwen2Audio, "mllama": Mllama}


def family_of(
    config: Any,
    image_size: int | None = None,
    task: str | None = None,
    trust_remote_code: bool = False,
    *,
    folder: Path | None = None,
) -> Family:
    """Return the family of a config.

    Args:
        config: transformers config.
        image_size: height and width of the images in pixels, for families that take any; see `feature_family`.
        task: what is to be made of it; None for whatever it is for.
        trust_remote_code: allow code that comes with the model.
        folder: with the processor's settings, which say the size of images where the config does not.

    Raises:
        UnknownArchitectureError: none is known for its `model_type`.
        OptionError: a size is given, and the model has one of its own; or it is for another task.
    """
    hears, sees = config.model_type in TASK_MODELS[SOUND.task].only, config.model_type in classes_of(IMAGES.task)
    medium = SOUND if hears and (task == SOUND.task or not sees) else IMAGES
    if task not in (None, medium.task):
        if task == AUDIO_TEXT_TO_TEXT and config.model_type not in classes_of(IMAGE_TEXT_TO_TEXT):
            known = ", ".join(sorted(classes_of(AUDIO_TEXT_TO_TEXT)))
            raise UnknownArchitectureError(
                f"--task {task}: models of type {config.model_type!r} do not hear.", f"Model types that do: {known}."
            )
        raise OptionError(
            f"--task {task}: models of type {config.model_type!r} need --task {medium.task}.",
            f"Use --task {medium.task}.",
        )
    known_family = _FAMILIES.get(config.model_type)
    if known_family is None:
        processed = processed_size(folder) if medium is IMAGES else None
        return feature_family(medium, config, image_size, trust_remote_code, processed and processed[0])
    if image_size is not None:
        takes = "no images" if medium.hears else "images of any size, cut into tiles of one size"
        raise OptionError(f"--image-size {image_size}: this model takes {takes}.", "Omit it.")
    return known_family(config)


__all__ = ["family_of"]

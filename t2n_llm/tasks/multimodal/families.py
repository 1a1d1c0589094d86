"""Which family a config is of, and vision-language models for images of one size: how these become rows of embeddings.

In: transformers' model. Out: the same computation without what depends on values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from generic_export.errors import OptionError, UnknownArchitectureError
from t2n_llm.graph.options import DEFAULT_IMAGE_SIZE
from t2n_llm.tasks.multimodal.family import FRAME_MASK, POSITIONS, SOUND, TOKEN_TYPES, Family, Medium, Senses, Sight
from t2n_llm.tasks.multimodal.qwen_vl import Qwen3VL, Qwen25VL

_FRAMES_PER_POSITION = 2  # the encoder's second convolution has a stride of 2


class _Whisper(Senses):
    """What speech models with an encoder like Whisper's have in common."""

    medium: ClassVar[Medium] = SOUND

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """See `Family`: log-mel features and frames of a segment."""
        audio = config.audio_config
        return int(audio.num_mel_bins), int(audio.max_source_positions * _FRAMES_PER_POSITION)

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """See `Family`."""
        del config, is_image
        return {"input_features": pixels} if len(pixels) else {}


@dataclass(frozen=True)
class Voxtral(_Whisper):
    """Voxtral: segments of 30 seconds, the last one padded with silence, which is heard; neighbouring positions joined."""

    decoder_input: str | None = None
    stacks_images: bool = True

    def rows_per_image(self, config: Any) -> int:
        """See `Family`."""
        audio = config.audio_config
        return int(audio.max_source_positions * audio.hidden_size // audio.intermediate_size)

    def sight(self, network: Any) -> Sight:
        """See `Family`; the rows of each segment stay apart."""
        model, rows = network.model, self.rows_per_image(network.config)
        width = network.config.audio_config.intermediate_size

        def look(features: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            del buffers
            heard = model.audio_tower(features, return_dict=True).last_hidden_state
            return (model.multi_modal_projector(heard.reshape(-1, rows, width)),)

        return Sight({}, look)


@dataclass(frozen=True)
class Qwen2Audio(_Whisper):
    """Qwen2-Audio: recordings of up to 30 seconds, what is beyond their end hidden; neighbouring positions averaged."""

    masked: ClassVar[bool] = True

    decoder_input: str | None = None
    stacks_images: bool = True

    def rows_per_image(self, config: Any) -> int:
        """See `Family`: those of a whole segment."""
        return self.rows_of(config, self.pixel_shape(config)[-1])

    def rows_of(self, config: Any, frames: int) -> int:
        """See `Family`; a recording ends with its last whole row."""
        del config
        return (frames + 1) // _FRAMES_PER_POSITION // 2

    def sight(self, network: Any) -> Sight:
        """See `Family`; a position that covers a frame of the recording is seen."""
        model = network.model
        positions = network.config.audio_config.max_source_positions

        def look(features: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            seen = buffers[FRAME_MASK][:, None, None, ::_FRAMES_PER_POSITION] > 0
            mask = seen.expand(-1, 1, positions, positions)
            heard = model.audio_tower(features, attention_mask=mask, return_dict=True).last_hidden_state
            return (model.multi_modal_projector(heard),)

        return Sight({}, look)


@dataclass(frozen=True)
class Idefics3(Senses):
    """Idefics3 and SmolVLM: tiles of one size, a SigLIP encoder, neighbouring patches joined."""

    decoder_input: str | None = None
    stacks_images: bool = True

    def rows_per_image(self, config: Any) -> int:
        """See `Family`."""
        side = config.vision_config.image_size // config.vision_config.patch_size
        return int(side**2 // config.scale_factor**2)

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """See `Family`."""
        return _square(config.vision_config)

    def sight(self, network: Any) -> Sight:
        """See `Family`; every patch of a tile is seen, so nothing is masked."""
        vision = network.model.vision_model

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            patches = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
            hidden = patches + vision.embeddings.position_embedding(buffers["patch_positions"])
            hidden = vision.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
            return (network.model.connector(vision.post_layernorm(hidden)),)

        return Sight({"patch_positions": _patch_positions(vision.embeddings, network.config.vision_config)}, look)

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """See `Family`."""
        del config, is_image
        return {"pixel_values": pixels[None]} if len(pixels) else {}


def _patch_positions(embeddings: Any, config: Any) -> torch.Tensor:
    """Return the position of each patch of a whole tile, as the model's own code computes it, in floating point.

    That code runs once, on a table of one column which holds its row numbers.
    """
    narrow = copy.deepcopy(config)
    narrow.hidden_size = 1
    probe, side = type(embeddings)(narrow), config.image_size // config.patch_size
    with torch.no_grad():
        probe.patch_embedding.weight.zero_()
        probe.patch_embedding.bias.zero_()
        probe.position_embedding.weight.copy_(torch.arange(side**2)[:, None])
        numbers = probe(torch.zeros(1, *_square(config)), torch.ones(1, side, side, dtype=torch.bool))
    return numbers[0, :, 0].round().long()


@dataclass(frozen=True)
class Gemma3(Senses):
    """Gemma 3: images of one size, a SigLIP encoder, patches averaged; the rows of an image see each other."""

    decoder_input: str | None = TOKEN_TYPES
    stacks_images: bool = True

    def rows_per_image(self, config: Any) -> int:
        """See `Family`."""
        return int(config.mm_tokens_per_image)

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """See `Family`."""
        return _square(config.vision_config)

    def sight(self, network: Any) -> Sight:
        """See `Family`."""

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            del buffers
            return (network.model.get_image_features(pixels, return_dict=True).pooler_output,)

        return Sight({}, look)

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """See `Family`."""
        del config
        return {TOKEN_TYPES: is_image.long()} | ({"pixel_values": pixels} if len(pixels) else {})


_FIXED: Mapping[str, Family] = {
    "idefics3": Idefics3(),
    "smolvlm": Idefics3(),
    "gemma3": Gemma3(),
    "voxtral": Voxtral(),
    "qwen2_audio": Qwen2Audio(),
}
_SIZED: Mapping[str, Callable[[int], Family]] = {
    "qwen2_5_vl": Qwen25VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
}


def family_of(config: Any, image_size: int | None = None, task: str | None = None) -> Family:
    """Return the family of a config.

    Args:
        config: transformers config.
        image_size: height and width of the images in pixels, for families that take any; None takes 448.
        task: what is to be made of it; None for whatever it is for.

    Raises:
        UnknownArchitectureError: none is known for its `model_type`.
        OptionError: a size is given, and the model has one of its own; or it is for another task.
    """
    family = _known_family(config, image_size)
    if task not in (None, family.medium.task):
        raise OptionError(
            f"--task {task}: models of type {config.model_type!r} need --task {family.medium.task}.",
            f"Use --task {family.medium.task}.",
        )
    own = None if config.model_type in _SIZED else getattr(getattr(config, "vision_config", None), "image_size", 0)
    if None not in (image_size, own) and image_size != own:
        has = f"this model's images have {own} pixels" if own else "this model takes no images"
        raise OptionError(f"--image-size {image_size}: {has}.", "Omit it.")
    return family


def _known_family(config: Any, image_size: int | None) -> Family:
    if config.model_type in _SIZED:
        return _SIZED[config.model_type](DEFAULT_IMAGE_SIZE if image_size is None else image_size)
    if config.model_type in _FIXED:
        return _FIXED[config.model_type]
    raise UnknownArchitectureError(
        f"multimodal models of type {config.model_type!r} are not supported yet.",
        f"Supported: {', '.join((*_FIXED, *_SIZED))}. Its text model may be exported with --task text-generation.",
    )


def _square(vision: Any) -> tuple[int, int, int]:
    return int(vision.num_channels), int(vision.image_size), int(vision.image_size)


__all__ = ["FRAME_MASK", "POSITIONS", "TOKEN_TYPES", "Family", "Sight", "family_of"]

"""What differs from one family of vision-language models to the next: how images become rows of embeddings.

In: transformers' model. Out: the same computation without what depends on values, for images of one size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from generic_export.errors import OptionError, UnknownArchitectureError

TOKEN_TYPES, POSITIONS = "token_type_ids", "position_ids"
"""What some decoders take beside embeddings: 1 where an image is, int64 [1, S]; and where each token is, int64 [3, 1, S]."""


@dataclass(frozen=True)
class Sight:
    """An image encoder, ready for capture.

    Attributes:
        buffers: what it needs beside the pixels, computed once.
        look: pixels and those buffers in, rows of embeddings out.
    """

    buffers: Mapping[str, torch.Tensor]
    look: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]


class Family(Protocol):
    """One way of seeing."""

    @property
    def decoder_input(self) -> str | None:
        """What the decoder takes beside embeddings: `TOKEN_TYPES`, `POSITIONS` or nothing."""

    @property
    def stacks_images(self) -> bool:
        """Whether the image encoder takes several images at once, along a first axis."""

    def image_token_id(self, config: Any) -> int:
        """Return the id that stands for a row of an image in a prompt."""

    def rows_per_image(self, config: Any) -> int:
        """Return how many rows an image becomes."""

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """Return the shape of one image, as transformers' image processor gives it."""

    def sight(self, network: Any) -> Sight:
        """Return the image encoder of a network."""

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """Return what transformers' forward takes for a prompt, beside its ids.

        Args:
            config: of the model.
            is_image: bool [1, S].
            pixels: of all its images, [N, ...].
        """

    def positions(self, config: Any, is_image: np.ndarray, start: int) -> tuple[np.ndarray, int]:
        """Return the positions int64 [3, 1, S] of a call's tokens, and that of the token after them.

        Args:
            config: of the model.
            is_image: bool [S].
            start: position of the first token.
        """


class _CountedPositions:
    """Positions that the decoder counts itself."""

    def positions(self, config: Any, is_image: np.ndarray, start: int) -> tuple[np.ndarray, int]:
        """See `Family`: one after the other."""
        del config
        count = np.arange(start, start + len(is_image), dtype=np.int64)
        return np.broadcast_to(count, (3, 1, len(is_image))).copy(), start + len(is_image)


@dataclass(frozen=True)
class Idefics3(_CountedPositions):
    """Idefics3 and SmolVLM: tiles of one size, a SigLIP encoder, neighbouring patches joined."""

    decoder_input: str | None = None
    stacks_images: bool = True

    def image_token_id(self, config: Any) -> int:
        """See `Family`."""
        return int(config.image_token_id)

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

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
            patches = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
            hidden = patches + vision.embeddings.position_embedding(buffers["patch_positions"])
            hidden = vision.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
            rows: torch.Tensor = network.model.connector(vision.post_layernorm(hidden))
            return rows

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
class Gemma3(_CountedPositions):
    """Gemma 3: images of one size, a SigLIP encoder, patches averaged; the rows of an image see each other."""

    decoder_input: str | None = TOKEN_TYPES
    stacks_images: bool = True

    def image_token_id(self, config: Any) -> int:
        """See `Family`."""
        return int(config.image_token_id)

    def rows_per_image(self, config: Any) -> int:
        """See `Family`."""
        return int(config.mm_tokens_per_image)

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """See `Family`."""
        return _square(config.vision_config)

    def sight(self, network: Any) -> Sight:
        """See `Family`."""

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
            del buffers
            rows: torch.Tensor = network.model.get_image_features(pixels, return_dict=True).pooler_output
            return rows

        return Sight({}, look)

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """See `Family`."""
        del config
        return {TOKEN_TYPES: is_image.long()} | ({"pixel_values": pixels} if len(pixels) else {})


@dataclass(frozen=True)
class Qwen25VL:
    """Qwen2.5-VL: a grid of patches in windows, which is fixed here; positions with three coordinates.

    Attributes:
        image_size: height and width of the images in pixels.
    """

    image_size: int
    decoder_input: str | None = POSITIONS
    stacks_images: bool = False

    def image_token_id(self, config: Any) -> int:
        """See `Family`."""
        return int(config.image_token_id)

    def rows_per_image(self, config: Any) -> int:
        """See `Family`."""
        return self._merged_side(config) ** 2

    def pixel_shape(self, config: Any) -> tuple[int, ...]:
        """See `Family`: patches in the order of the processor, each with its channels, frames and pixels."""
        vision = config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return (self._side(config) ** 2, width)

    def sight(self, network: Any) -> Sight:
        """See `Family`; what depends on the grid is handed to the encoder as it allows, lengths of windows as numbers."""
        from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

        config, visual = network.config, network.model.visual
        grid, merge = self._grid(config, 1), config.vision_config.spatial_merge_size
        window_index, window_ends = get_vision_window_index(
            grid, merge, config.vision_config.window_size, config.vision_config.patch_size
        )
        buffers = {"patch_positions": get_vision_position_ids(grid, merge), "window_index": window_index.long()}
        ends, whole = window_ends.numpy(), np.array([0, self._side(config) ** 2])

        def look(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
            rows: torch.Tensor = visual(
                pixels,
                grid_thw=None,
                position_ids=buffers["patch_positions"],
                window_index=buffers["window_index"],
                cu_window_seqlens=ends,
                cu_seqlens=whole,
                return_dict=True,
            ).pooler_output
            return rows

        return Sight(buffers, look)

    def reference_inputs(self, config: Any, is_image: torch.Tensor, pixels: torch.Tensor) -> dict[str, Any]:
        """See `Family`."""
        if not len(pixels):
            return {}
        return {
            "pixel_values": pixels.flatten(0, 1),
            "image_grid_thw": self._grid(config, len(pixels)),
            "mm_token_type_ids": is_image.int(),
        }

    def positions(self, config: Any, is_image: np.ndarray, start: int) -> tuple[np.ndarray, int]:
        """See `Family`: text counts on in all three; an image has one time, rows and columns, and takes its side."""
        side, rows = self._merged_side(config), self.rows_per_image(config)
        places = np.stack([np.zeros(rows, np.int64), *np.divmod(np.arange(rows), side)])
        columns, index = [], 0
        while index < len(is_image):
            columns.append((places if is_image[index] else np.zeros((3, 1), np.int64)) + start)
            start += side if is_image[index] else 1
            index += columns[-1].shape[1]
        return np.concatenate(columns, axis=1)[:, None], start

    def _side(self, config: Any) -> int:
        """Return how many patches an image has in each direction.

        Raises:
            OptionError: its size is no multiple of what the encoder joins.
        """
        vision = config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        if self.image_size < 1 or self.image_size % unit:
            raise OptionError(
                f"--image-size {self.image_size}: this model takes multiples of {unit} pixels.",
                f"Use --image-size {max(1, round(self.image_size / unit)) * unit}.",
            )
        return int(self.image_size // vision.patch_size)

    def _merged_side(self, config: Any) -> int:
        return self._side(config) // int(config.vision_config.spatial_merge_size)

    def _grid(self, config: Any, images: int) -> torch.Tensor:
        """Return time, height and width in patches, for each of some images."""
        return torch.tensor([[1, self._side(config), self._side(config)]] * images)


_DEFAULT_IMAGE_SIZE = 448
_FIXED: Mapping[str, Family] = {"idefics3": Idefics3(), "smolvlm": Idefics3(), "gemma3": Gemma3()}
_SIZED: Mapping[str, Callable[[int], Family]] = {"qwen2_5_vl": Qwen25VL}


def family_of(config: Any, image_size: int | None = None) -> Family:
    """Return the family of a config.

    Args:
        config: transformers config.
        image_size: height and width of the images in pixels, for families that take any; None takes 448.

    Raises:
        UnknownArchitectureError: none is known for its `model_type`.
        OptionError: a size is given, and the model has one of its own.
    """
    if config.model_type in _SIZED:
        return _SIZED[config.model_type](_DEFAULT_IMAGE_SIZE if image_size is None else image_size)
    family = _FIXED.get(config.model_type)
    if family is None:
        raise UnknownArchitectureError(
            f"vision-language models of type {config.model_type!r} have no export yet.",
            f"Known: {', '.join((*_FIXED, *_SIZED))}. Its text model alone may be exported with --task text-generation.",
        )
    own = config.vision_config.image_size
    if image_size not in (None, own):
        raise OptionError(f"--image-size {image_size}: this model's images have {own} pixels.", "Leave it out.")
    return family


def _square(vision: Any) -> tuple[int, int, int]:
    return int(vision.num_channels), int(vision.image_size), int(vision.image_size)

"""What a family of vision-language or speech models says about itself.

In: transformers' model and config. Out: a `Encoder`, shapes and places, which graph, manifest and check share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from generic_export.torch_graph.request import DynamicSize
from t2n_llm.tasks.names import AUDIO_TEXT_TO_TEXT, IMAGE_TEXT_TO_TEXT

TOKEN_TYPES, POSITIONS, PER_LAYER = "token_type_ids", "position_ids", "per_layer_inputs"
MODALITY_TYPES = "mm_token_type_ids"
"""What newer models call their token types."""

"""What some decoders take beside embeddings: 1 where an image is, int64 [1, S]; where each token is, int64 [3, 1, S]; and further
embeddings for each layer, [1, S, layers, width], which `embed` gives."""

SEEN_ROWS = "cross_attention_mask"
"""What decoders with cross-attention take beside embeddings: 1 for each row of an image that a token sees, f32 [1, S, rows]."""

FRAME_MASK = "feature_attention_mask"
"""What some encoders take beside segments of sound: 1 for each frame before the end of a recording, int64 [N, frames]."""


@dataclass(frozen=True)
class Medium:
    """What is sensed, and what that is called.

    Attributes:
        task: of the export.
        role: the archive of the encoder.
        noun: one item.
        token_field: of the config: the id of the token that stands for a row of an item.
        input_name, output_name: of that archive.
    """

    task: str
    role: str
    noun: str
    token_field: str
    input_name: str
    output_name: str

    @property
    def hears(self) -> bool:
        """Whether it is sound."""
        return self.task == AUDIO_TEXT_TO_TEXT


IMAGES = Medium(IMAGE_TEXT_TO_TEXT, "vision", "image", "image_token_id", "pixel_values", "image_embeds")
SOUND = Medium(AUDIO_TEXT_TO_TEXT, "audio", "segment", "audio_token_id", "input_features", "audio_embeds")


@dataclass(frozen=True)
class Encoder:
    """An encoder of images or sound, ready for capture.

    Attributes:
        buffers: what it needs beside the pixels, computed once; where `Family.masked`, `FRAME_MASK` is handed over with them.
        encode: pixels or sound, and those buffers in; out come rows of embeddings, then the rows for each layer of
            `deepstack_layers`.
    """

    buffers: Mapping[str, torch.Tensor]
    encode: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]


class Family(Protocol):
    """One way of seeing or hearing; where it says image, a segment of sound is meant too."""

    @property
    def medium(self) -> Medium:
        """What it senses."""

    @property
    def config(self) -> Any:
        """The model's config."""

    @property
    def decoder_input(self) -> str | None:
        """What the decoder takes beside embeddings: `TOKEN_TYPES`, `POSITIONS`, `PER_LAYER`, `SEEN_ROWS` or nothing."""

    @property
    def takes_ids(self) -> bool:
        """Whether the decoder takes the tokens' ids, int64 [1, S], beside their embeddings too."""

    @property
    def bidirectional_prompts(self) -> bool:
        """Whether each token of a prompt sees the whole prompt (PaliGemma); `TOKEN_TYPES` are 0 in it and 1 after it."""

    @property
    def stacks_images(self) -> bool:
        """Whether the image encoder takes several images at once, along a first axis."""

    @property
    def masked(self) -> bool:
        """Whether the encoder is told how long each segment is (`FRAME_MASK`), and only the first of its rows are used."""

    @property
    def position_axes(self) -> int:
        """How many coordinates a position has."""

    @property
    def image_token_id(self) -> int:
        """The id that stands for a row of an image in a prompt."""

    @property
    def rows_per_image(self) -> int:
        """How many rows an image becomes, at most."""

    @property
    def row_count(self) -> int | str:
        """How many rows an image becomes; a formula of its sizes, where there are `free_axes`."""

    def rows_of(self, frames: int) -> int:
        """Return how many rows a segment of some frames becomes."""

    def rows_of_image(self, shape: Sequence[int]) -> int:
        """Return how many rows an image or a whole segment of some shape becomes."""

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """The decoder's layers to whose outputs further rows of an image are added; -1 for what the first layer takes."""

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """The decoder's layers that read images by cross-attention: the encoder makes their keys and values; else none."""

    @property
    def cross_width(self) -> int:
        """How many numbers the keys of a row of an image have there, those of all heads."""

    def random_image(self, generator: np.random.Generator) -> np.ndarray | None:
        """Return an image for a check; None where any numbers of `pixel_shape` are one."""

    def later_inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what transformers' forward takes for the token after a prompt, beside its id.

        Args:
            given: what it took for the prompt, or for the token before.
        """

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """The shape of one image, as transformers' image processor gives it; of an example, where there are `free_axes`."""

    @property
    def pictures(self) -> Mapping[str, tuple[int, ...]]:
        """The inputs of transformers' model that one image becomes, with their shapes, where it becomes several pictures.

        The archive takes the numbers of all of them in one row.
        """

    @property
    def input_description(self) -> str:
        """What the archive takes as an image, in words for `export.json`."""

    @property
    def free_axes(self) -> Mapping[int, DynamicSize]:
        """The axes of an image that may have any size; none where images have one size."""

    @property
    def mixes_sizes(self) -> bool:
        """Whether one prompt may have images of several sizes, where there are `free_axes`."""

    def split(self, processed: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return the images that the processor made, each as the archive takes it, where there are `free_axes`.

        Raises:
            OptionError: one is a video.
        """

    def image_side(self) -> int | None:
        """Return the height and width in pixels that the encoder expects; None if it accepts any size."""

    def joined_axis(self) -> int:
        """Return the axis along which transformers' processor joins images, where the encoder does not stack them."""

    def known(self, shapes: Sequence[Sequence[int]]) -> Mapping[str, torch.Tensor]:
        """Return what the processor gives beside the pixels of images of these shapes. The encoder needs no input for it."""

    def encoder(self, network: Any) -> Encoder:
        """Return the image encoder of a network."""

    def reference_inputs(self, is_image: torch.Tensor, images: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return what transformers' forward takes for a prompt, beside its ids.

        Args:
            is_image: bool [1, S].
            images: of the prompt, each as the archive takes it.
        """

    def positions(self, ids: np.ndarray, shapes: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the positions int64 [axes, 1, S] of a text's tokens, from its start.

        Args:
            ids: int64 [S]; some models look for the tokens around an image.
            shapes: of its images.
        """


class BaseFamily(ABC):
    """What most families have in common: images, seen in the embeddings alone."""

    medium: ClassVar[Medium] = IMAGES
    masked: ClassVar[bool] = False

    @property
    def takes_ids(self) -> bool:
        """See `Family`: no."""
        return False

    @property
    def bidirectional_prompts(self) -> bool:
        """See `Family`: no."""
        return False

    @property
    def position_axes(self) -> int:
        """See `Family`."""
        return 3

    @property
    @abstractmethod
    def rows_per_image(self) -> int:
        """See `Family`."""

    @property
    def row_count(self) -> int | str:
        """See `Family`."""
        return self.rows_per_image

    def rows_of(self, frames: int) -> int:
        """See `Family`: there is no other size."""
        del frames
        return self.rows_per_image

    def rows_of_image(self, shape: Sequence[int]) -> int:
        """See `Family`: there is no other size."""
        del shape
        return self.rows_per_image

    @property
    def pictures(self) -> Mapping[str, tuple[int, ...]]:
        """See `Family`: an image is one picture."""
        return {}

    @property
    def input_description(self) -> str:
        """See `Family`."""
        return "output of the model's processor, in order"

    @property
    def free_axes(self) -> Mapping[int, DynamicSize]:
        """See `Family`."""
        return {}

    @property
    def mixes_sizes(self) -> bool:
        """See `Family`."""
        return True

    def split(self, processed: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `Family`: there are none."""
        del processed
        return ()

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """See `Family`."""
        return ()

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """See `Family`: none."""
        return ()

    @property
    def cross_width(self) -> int:
        """See `Family`."""
        return 0

    def random_image(self, generator: np.random.Generator) -> np.ndarray | None:
        """See `Family`."""
        del generator
        return None

    def later_inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`: nothing."""
        del given
        return {}

    def image_side(self) -> int | None:
        """See `Family`."""
        return None

    def joined_axis(self) -> int:
        """See `Family`."""
        return 0

    def known(self, shapes: Sequence[Sequence[int]]) -> Mapping[str, torch.Tensor]:
        """See `Family`: nothing."""
        del shapes
        return {}

    def positions(self, ids: np.ndarray, shapes: Sequence[Sequence[int]]) -> np.ndarray:
        """See `Family`: one after the other, as the decoder counts them itself."""
        del shapes
        return np.broadcast_to(np.arange(len(ids), dtype=np.int64), (3, 1, len(ids)))

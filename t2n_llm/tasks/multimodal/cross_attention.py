"""Models whose text reads images by cross-attention (Llama 3.2 Vision): an image is keys and values of some layers.

An image is cut into tiles of one size, as many as its aspect ratio asks for; the other tiles are empty. One token stands for it in
a prompt, and what follows sees it up to the token of the next image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvcache.states.explicit_cache import put_states
from kvcache.states.tensors import Slot
from t2n_llm.tasks.multimodal.family import SEEN_ROWS, BaseFamily, Encoder, Family

_KINDS = ("key", "value")
_RATIO, _TILES = "aspect_ratio_ids", "aspect_ratio_mask"


@dataclass(frozen=True)
class Mllama(BaseFamily):
    """Llama 3.2 Vision."""

    config: Any
    decoder_input: str | None = SEEN_ROWS
    stacks_images: bool = True

    @property
    def image_token_id(self) -> int:
        """See `Family`."""
        return int(self.config.image_token_id)

    @property
    def rows_per_image(self) -> int:
        """See `Family`: one token stands for an image."""
        return 1

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """See `Family`."""
        return (sum(map(math.prod, self.pictures.values())),)

    @property
    def pictures(self) -> Mapping[str, tuple[int, ...]]:
        """See `Family`."""
        vision = self.config.vision_config
        tiles, side = vision.max_num_tiles, vision.image_size
        return {"pixel_values": (tiles, vision.num_channels, side, side), _RATIO: (), _TILES: (tiles,)}

    @property
    def input_description(self) -> str:
        """See `Family`."""
        return (
            f"for each image, the numbers of the processor's {', '.join(self.pictures)}, flattened, one after the other"
        )

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """See `Family`."""
        return tuple(self.config.text_config.cross_attention_layers)

    @property
    def cross_width(self) -> int:
        """See `Family`."""
        text = self.config.text_config
        return int(text.num_key_value_heads * text.hidden_size // text.num_attention_heads)

    def random_image(self, generator: np.random.Generator) -> np.ndarray:
        """See `Family`: an image of any aspect ratio, with its number of tiles."""
        ratios = self.config.vision_config.supported_aspect_ratios
        ratio = int(generator.integers(len(ratios)))
        pixels, _, tiles = self.pictures.values()
        real = np.arange(*tiles) < math.prod(ratios[ratio])
        numbers = generator.standard_normal(math.prod(pixels))
        return np.concatenate([numbers, [ratio + 1], real]).astype(np.float32)

    def encoder(self, network: Any) -> Encoder:
        """See `Family`; keys and values [rows, heads * D] of each layer, then [rows, 1]: 1 for rows of tiles that are not empty."""
        model = network.model
        layers = [model.language_model.layers[layer].cross_attn for layer in self.cross_layers]

        def encode(numbers: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            del buffers
            given = self._apart(numbers)
            seen = model.multi_modal_projector(model.vision_model(**given).last_hidden_state).flatten(0, -2)
            made: list[torch.Tensor] = []
            for layer in layers:
                keys = layer.k_norm(layer.k_proj(seen).unflatten(-1, (-1, layer.head_dim)))
                made += [keys.flatten(1), layer.v_proj(seen)]
            rows = given[_TILES].to(seen.dtype)[..., None].expand(-1, -1, -1, model.vision_model.num_patches)
            return *made, rows.reshape(-1, 1)

        return Encoder({}, encode)

    def reference_inputs(self, is_image: torch.Tensor, images: Sequence[torch.Tensor]) -> dict[str, Any]:
        """See `Family`."""
        if not images:
            return {}
        given = self._apart(torch.stack(tuple(images)))
        tiles = given[_TILES].reshape(-1, 1).numpy()
        seen = torch.from_numpy(rows_seen(is_image[0].numpy(), tiles))
        return {**given, SEEN_ROWS: seen.unflatten(1, (len(images), -1))[None].long()}

    def later_inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family`: a new token sees what the last one did."""
        return {SEEN_ROWS: given[SEEN_ROWS][:, -1:]} if SEEN_ROWS in given else {}

    def _apart(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what transformers' vision model takes for images [N, numbers] of one text."""
        sizes = [math.prod(shape) for shape in self.pictures.values()]
        parts = zip(self.pictures.items(), numbers.split(sizes, dim=-1), strict=True)
        given = {name: part.reshape(1, -1, *shape) for (name, shape), part in parts}
        return given | {name: given[name].long() for name in (_RATIO, _TILES)}


def rows_seen(is_image: np.ndarray, real: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
    """Return which rows of images tokens of a text see, f32 [tokens, rows], as transformers' `MllamaProcessor` says it.

    Args:
        is_image: bool [S], where the tokens of images are.
        real: f32 [rows, 1], 1 for rows of tiles that are not empty; as many rows for each image.
        tokens: numbers of tokens, int [tokens]; None for all of the text.
    """
    tokens = np.arange(len(is_image)) if tokens is None else tokens
    places = np.flatnonzero(is_image)
    seen = np.zeros((len(tokens), len(real)), np.float32)
    ends = [*places[1:], len(is_image)]
    for index in reversed(range(len(places) - 1)):
        if places[index] + 1 == places[index + 1]:  # images side by side are seen by what follows them all
            ends[index] = ends[index + 1]
    edges = pairwise(np.linspace(0, len(real), len(places) + 1).astype(int))
    for start, end, (first, last) in zip(places, ends, edges, strict=False):
        seen[(tokens >= start) & (tokens < end), first:last] = real[first:last, 0]
    return seen


def no_image(family: Family) -> list[np.ndarray]:
    """Return what the encoder makes, of no image: one row of zeros that no token sees, so that the layers add nothing."""
    tables = len(cross_names(family.cross_layers))
    return [*(np.zeros((1, family.cross_width), np.float32) for _ in range(tables)), np.zeros((1, 1), np.float32)]


def cross_names(layers: Sequence[int]) -> tuple[str, ...]:
    """Return what keys and values of images are called, for each layer, in `vision` and in `decoder`."""
    return tuple(f"cross_{kind}_{layer}" for layer in layers for kind in _KINDS)


@contextmanager
def reading_images(network: Any, layers: Sequence[int], rows: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the layers of a decoder read keys and values of images, for the length of the block.

    Args:
        network: transformers' model.
        layers: that have cross-attention.
        rows: keys and values [rows, heads * D] of each.
    """
    if not layers:
        yield
        return
    text, vision = network.model.language_model, network.model.vision_model
    width = text.layers[layers[0]].cross_attn.head_dim
    slots = [Slot(f"cache_{kind}", layer) for layer in layers for kind in _KINDS]
    heads = [table.unflatten(-1, (-1, width)).transpose(0, 1)[None] for table in rows]

    def put(_module: Any, _given: Any, keywords: dict[str, Any]) -> None:
        put_states(keywords["cache"], dict(zip(slots, heads, strict=True)))

    handle = text.register_forward_pre_hook(put, with_kwargs=True)
    try:
        # transformers' mask says which tiles are seen; here it says which rows.
        with mock.patch.object(vision, "num_patches", 1):
            yield
    finally:
        handle.remove()


__all__ = ["Mllama", "cross_names", "reading_images", "rows_seen"]

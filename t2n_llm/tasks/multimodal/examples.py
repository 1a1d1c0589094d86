"""How to pass one image or one segment of sound to a model: the tensor's shape, and the arguments that depend on the size.

In: a transformers config, and the parameters of the model's `get_image_features` or `get_audio_features`. Out: candidates;
use the first one that runs. transformers names these parameters the same way in all models, so the names determine the form.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from generic_export.errors import OptionError
from t2n_llm.graph.options import DEFAULT_IMAGE_SIZE
from t2n_llm.tasks.multimodal.any_length import AnyLengthSound
from t2n_llm.tasks.multimodal.any_size import FreeForm, MaskedPatches, PatchGrid, PlacedPatches, SizedPixels
from t2n_llm.tasks.multimodal.family import IMAGES

_ANY_SIZE = ("image_grid_thw", "image_grid_hw", "spatial_shapes", "target_sizes", "image_position_ids")
_MOST_TILES = 12
_FRAMES = 3000  # half a minute in steps of 10 ms
_EXAMPLE_FRAMES = 403
_EXAMPLE_SAMPLES = 16003
_FAR_SAMPLES = 1 << 20
_SOUND_MASKS = ("input_features_mask", "padding_mask")
SAMPLES = "input_values"
"""The input of models that read the samples of a recording."""

_HIGH_RESOLUTION = "high_res_pixel_values"
"""The input of models that read each image a second time, in a larger size."""

_COMMON_SIDE = 4  # of patches that are joined in pairs, twice


@dataclass(frozen=True)
class EncoderExample:
    """How one image is passed to `get_image_features`.

    Attributes:
        pixels: shape of `pixel_values`.
        known: the other arguments, the same for each image of this size, with the images along their first axis; along their
            second one, if `nested`.
        axis: of `pixel_values`, along which several images are joined.
        nested: whether the model has an axis before them, of texts with several images each.
        side: height and width of the image in pixels that gives these arguments; None where images of all sizes do.
        form: how images of any size are passed; None where that is not known.
        is_free: whether images have any size; `pixels` is an example then.
        pictures: see `Family`.
    """

    pixels: tuple[int, ...]
    known: Mapping[str, torch.Tensor] = field(default_factory=dict)
    axis: int = 0
    nested: bool = False
    side: int | None = None
    form: FreeForm | None = None
    is_free: bool = False
    pictures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def named(self, name: str, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model takes for images, by name.

        Args:
            name: of the input, where it is one.
            pixels: as `pixels` says their shape; [N, numbers] where there are `pictures`.
        """
        if not self.pictures:
            return {name: pixels[None] if self.nested else pixels}
        rows = pixels.split([math.prod(shape) for shape in self.pictures.values()], dim=-1)
        return {each: row.unflatten(-1, shape) for (each, shape), row in zip(self.pictures.items(), rows, strict=True)}

    @property
    def free_form(self) -> FreeForm | None:
        """How an image of any size is passed; None if all images have one size."""
        return self.form if self.is_free else None

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return height and width of an image in rows of embeddings, where they are known; (0, 0) else.

        Args:
            shape: of the image; its sizes may be symbolic.
        """
        if not isinstance(self.form, PatchGrid):
            return 0, 0
        if self.is_free:
            return shape[0], shape[1]
        side = math.isqrt(self.pixels[0]) // self.form.merge
        return side, side

    def freed(self) -> EncoderExample:
        """Return the same for images of any size; unchanged if there is no form for them."""
        if self.form is None:
            return self
        return replace(self, pixels=self.form.example(self.pixels), known={}, side=None, is_free=True)


def takes_any_size(config: Any, parameters: Collection[str]) -> bool:
    """Say whether a model reads images of more than one size.

    Args:
        config: transformers config.
        parameters: names, of `get_image_features`.
    """
    return any(name in parameters for name in _ANY_SIZE) or _pixels_per_row(config) is not None


def own_image_size(config: Any) -> int | None:
    """Return height and width in pixels that a config gives images; None where it does not say."""
    return _first(_vision_part(config), *_SIZES, default=None)


def image_examples(config: Any, parameters: Collection[str], image_size: int | None) -> Iterator[EncoderExample]:
    """Return the candidates for one image.

    Args:
        config: transformers config.
        parameters: names, of `get_image_features`.
        image_size: height and width in pixels, for models that take any or whose config does not say; None takes 448, or the most
            that the model has.

    Raises:
        OptionError: the size is not a multiple of what the encoder joins.
    """
    vision = _Vision.of(config, image_size)
    if "image_grid_thw" in parameters:
        yield from _grids(vision, parameters, image_size)
    elif "image_grid_hw" in parameters:
        side, grid = vision.side(image_size, vision.merge), PatchGrid("image_grid_hw", vision.merge, timed=False)
        known = {grid.name: torch.tensor([[side, side]])}
        width = vision.channels * vision.patch**2
        yield EncoderExample((side * side, width), known, side=side * vision.patch, form=grid)
    elif "spatial_shapes" in parameters:
        factor = _first(config, "downsample_factor", default=2)
        side = vision.side(image_size, factor)
        mask = torch.ones((1, side * side), dtype=torch.int64)
        known = {"spatial_shapes": torch.tensor([[side, side]]), "pixel_attention_mask": mask}
        width, form = vision.channels * vision.patch**2, MaskedPatches(factor)
        yield EncoderExample((1, side * side, width), known, side=side * vision.patch, form=form)
    elif "target_sizes" in parameters:
        side = vision.side(image_size, _COMMON_SIDE)
        shape = (1, vision.channels, vision.patch, side * side * vision.patch)
        yield EncoderExample(shape, {"target_sizes": torch.tensor([[side, side]])}, axis=3, side=side * vision.patch)
    elif "image_position_ids" in parameters:
        pooled = _first(getattr(config, "vision_config", config), "pooling_kernel_size", default=1)
        side = vision.side(image_size, pooled)
        pixels = side * vision.patch
        for merge in dict.fromkeys((pooled, 1)):  # pooled by the encoder, or by the processor
            patch = vision.patch * pooled // merge
            yield _with_places(pixels // patch, vision.channels * patch**2, pixels, merge)
    elif _HIGH_RESOLUTION in parameters:
        yield _of_two_pictures(vision.square(), _Vision.of(config.high_res_vision_config, None).square())
    elif "pixel_attention_mask" in parameters:  # tiles of an image, all of them whole
        yield EncoderExample((1, *vision.square()), nested=True)
        yield EncoderExample((1, *vision.square()))
        is_real = torch.ones((1, 1), dtype=torch.bool)  # a mask of whole tiles (Granite Docling)
        yield EncoderExample((1, *vision.square()), {"pixel_attention_mask": is_real}, nested=True)
    elif "image_sizes" in parameters:
        unit = _pixels_per_row(config)
        side = vision.image_size if unit is None else vision.pixels(image_size)
        sizes = {"image_sizes": torch.tensor([[side, side]])}
        if unit is None:
            yield EncoderExample((1, *vision.square()))
        sized = None if unit is None else SizedPixels(unit)
        yield EncoderExample((1, vision.channels, side, side), sizes, side=side, form=sized)
        for tiles in range(2, _MOST_TILES):
            yield EncoderExample((1, tiles, *vision.square()), sizes, side=side)
    else:
        yield EncoderExample((1, *vision.square()))
        count = (
            vision.image_size // vision.patch
        ) ** 2  # patches with their channels last, each of them a row (Inkling)
        yield EncoderExample((count, vision.frames, vision.patch, vision.patch, vision.channels))
        yield EncoderExample((1, *vision.square()), nested=True)  # tiles (PerceptionLM)


def sound_examples(config: Any, parameters: Collection[str]) -> Iterator[EncoderExample]:
    """Return the candidates for one segment of sound.

    Args:
        config: transformers config.
        parameters: names, of `get_audio_features`.
    """
    audio = _audio_part(config)
    width = _mel_width(audio)
    frames = 2 * _first(audio, "max_source_positions", default=_FRAMES // 2)
    whole = torch.ones((1, frames), dtype=torch.int64)
    mask = {name: whole for name in _SOUND_MASKS if name in parameters}
    yield EncoderExample((1, width, frames), mask)
    yield EncoderExample((1, frames, width), mask)


def recordings(config: Any, parameters: Mapping[str, inspect.Parameter]) -> Iterator[AnyLengthSound]:
    """Return the candidates for a recording of any length, whose row count is not known yet.

    Args:
        config: transformers config.
        parameters: of `get_audio_features`.
    """
    audio = _audio_part(config)
    if hasattr(audio, "max_source_positions"):  # the encoder has an embedding of each position of a whole segment
        return
    mask = next((name for name in _SOUND_MASKS if name in parameters), None)
    needed = mask is not None and parameters[mask].default is inspect.Parameter.empty
    if SAMPLES in parameters:
        yield AnyLengthSound((1, 1, _EXAMPLE_SAMPLES), 2, mask, 0, needed, _FAR_SAMPLES)
        yield AnyLengthSound((1, _EXAMPLE_SAMPLES), 1, mask, 0, needed, _FAR_SAMPLES)
        return
    yield AnyLengthSound((1, _EXAMPLE_FRAMES, _mel_width(audio)), 1, mask, 0, needed)


def _audio_part(config: Any) -> Any:
    """Return the config of what hears."""
    parts = (getattr(config, name, None) for name in ("audio_config", "encoder_config"))
    return next((found for found in parts if found is not None), config)


def _mel_width(audio: Any) -> int:
    return int(_first(audio, "input_size", "num_mel_bins", "input_dim", "input_feat_size", default=128))


def _of_two_pictures(*shapes: tuple[int, ...]) -> EncoderExample:
    """Return an image in two sizes [C, H, W]."""
    return EncoderExample(
        (1, sum(map(math.prod, shapes))), pictures=dict(zip((IMAGES.input_name, _HIGH_RESOLUTION), shapes, strict=True))
    )


def _with_places(side: int, width: int, pixels: int, merge: int) -> EncoderExample:
    """Return the patches of an image, one a row, and the column and row of each."""
    form = PlacedPatches(merge)
    return EncoderExample((1, side * side, width), form.known([(side, side)]), side=pixels, form=form)


def _grids(vision: _Vision, parameters: Collection[str], image_size: int | None) -> Iterator[EncoderExample]:
    """Return images in patches, one a row, in the order of the processor."""
    side, merge_name = vision.side(image_size, vision.merge), "image_merge_sizes"
    grid = PatchGrid(
        "image_grid_thw", vision.merge, timed=True, merge_name=merge_name if merge_name in parameters else None
    )
    tokens = side // vision.merge
    known = grid.known([(tokens, tokens)])
    rows, pixels, square = side * side, side * vision.patch, (vision.patch, vision.patch)
    for frames in dict.fromkeys((vision.frames, 1, 2)):
        yield EncoderExample((rows, vision.channels * frames * math.prod(square)), known, side=pixels, form=grid)
    yield EncoderExample((rows, vision.channels, *square), known, side=pixels, form=grid)
    joined = vision.merge * vision.patch  # by the processor, channels last (Inkling 2)
    known = {"image_grid_thw": torch.tensor([[1, tokens, tokens]])}
    yield EncoderExample((tokens * tokens, joined, joined, vision.channels), known, side=pixels)


_SIZES = ("image_size", "max_image_size")


def _vision_part(config: Any) -> Any:
    """Return the config of what reads the image."""
    parts = (getattr(config, name, None) for name in ("vision_config", "vq_config"))
    part = next((found for found in parts if found is not None), config)
    return part if hasattr(part, "image_size") else getattr(part, "sam_config", part)  # of two encoders


@dataclass(frozen=True)
class _Vision:
    """The image fields of a config under one name each; model families name them differently."""

    image_size: int
    patch: int
    channels: int
    frames: int
    merge: int

    @classmethod
    def of(cls, config: Any, image_size: int | None) -> _Vision:
        part = _vision_part(config)
        merge = _first(part, "spatial_merge_size", "merge_kernel_size", "merge_size", default=None)
        return cls(
            image_size=_first(part, *_SIZES, default=image_size or DEFAULT_IMAGE_SIZE),
            patch=_first(part, "patch_size", default=14),
            channels=_first(part, "num_channels", "in_channels", "in_chans", default=3),
            frames=_first(part, "temporal_patch_size", "patch_temporal", default=1),
            merge=merge or _first(config, "spatial_merge_size", default=2),
        )

    def square(self) -> tuple[int, int, int]:
        """Return the shape of an image of the model's own size."""
        return self.channels, self.image_size, self.image_size

    def pixels(self, image_size: int | None) -> int:
        """Return the height of an image, for models that have a largest one."""
        return min(DEFAULT_IMAGE_SIZE, self.image_size) if image_size is None else image_size

    def side(self, image_size: int | None, joined: int) -> int:
        """Return how many patches an image has in each direction.

        Args:
            image_size: height and width in pixels; None takes the multiple nearest to 448.
            joined: how many patches in each direction become one row.

        Raises:
            OptionError: the size is not a multiple of the pixels that are joined.
        """
        unit = self.patch * joined
        nearest = max(1, round((image_size or DEFAULT_IMAGE_SIZE) / unit)) * unit
        if image_size is not None and (image_size < 1 or image_size % unit):
            raise OptionError(
                f"--image-size {image_size}: this model takes multiples of {unit} pixels.",
                f"Use --image-size {nearest}.",
            )
        return nearest // self.patch


def _pixels_per_row(config: Any) -> int | None:
    """Return how many pixels in each direction become a row, where a config's encoder reads images padded to the largest one."""
    vision: Any = getattr(config, "vision_config", None)
    if getattr(vision, "model_type", None) == "pixtral":
        return int(vision.patch_size * _first(config, "spatial_merge_size", default=1))
    return getattr(vision, "spatial_scale_factor", None)  # codes of an image (Apertus 1.5)


def _first(config: Any, *names: str, default: Any) -> Any:
    """Return the first of some fields that is a number; of a list its first one."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


__all__ = ["SAMPLES", "EncoderExample", "image_examples", "recordings", "sound_examples", "takes_any_size"]

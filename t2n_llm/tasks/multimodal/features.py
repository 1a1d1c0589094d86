"""Models that see images or hear sound of one size, through the interface that transformers gives all of them.

`get_image_features` and `get_audio_features` make rows of embeddings. What depends on the size alone (a grid of patches, windows,
positions) is known during the capture and becomes constants. In: a config. Out: a `FeatureFamily`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from generic_export.errors import OptionError, UnknownArchitectureError
from generic_export.torch_graph.request import DynamicSize
from t2n_llm.source.empty_model import MULTIMODAL_MODEL, instantiate
from t2n_llm.tasks.multimodal.any_length import (
    AnyLengthSound,
    RowCount,
    filled_up_sound,
    fills_up_sound,
    find_row_count,
)
from t2n_llm.tasks.multimodal.blocks import blocks_filled_up
from t2n_llm.tasks.multimodal.codes import CODE_TOKENS, code_tokens, codes_looked_up
from t2n_llm.tasks.multimodal.encoder import EncoderModule
from t2n_llm.tasks.multimodal.examples import (
    SAMPLES,
    EncoderExample,
    image_examples,
    own_image_size,
    recordings,
    sound_examples,
    takes_any_size,
)
from t2n_llm.tasks.multimodal.family import (
    IMAGES,
    MODALITY_TYPES,
    PER_LAYER,
    POSITIONS,
    SOUND,
    TOKEN_TYPES,
    BaseFamily,
    Encoder,
    Medium,
)
from t2n_llm.tasks.multimodal.resampling import positions_of_one_image
from t2n_llm.tasks.multimodal.windows import windows_filled_up

_OF_ONE_SIZE = frozenset({"kimi_k25", "muse_glimmer", "muse_spark", "nemotron_h_omni"})
"""Types whose encoders cannot be captured for grids of any size: they read numbers of patches from tensors."""

_WITH_BIDIRECTIONAL_PROMPTS = frozenset({"paligemma"})

_FUNCTIONS = {IMAGES.task: "get_image_features", SOUND.task: "get_audio_features"}
_TOKEN_FIELDS = {
    IMAGES.task: ("image_token_id", "image_token_index", "media_placeholder_token_id"),
    SOUND.task: ("audio_token_id", "audio_token_index"),
}


@dataclass(frozen=True, eq=False)
class FeatureFamily(BaseFamily):
    """A model that replaces placeholder tokens with the features of images or sound.

    Attributes:
        sensed: images or sound.
        network: transformers' model, without weights.
        example: how it takes an image.
        rows: how many rows an image becomes.
        stacked: see `Family.deepstack_layers`.
        stacks_images: whether the encoder reads several images at once.
    """

    sensed: Medium
    network: Any
    example: EncoderExample
    rows: int
    stacked: tuple[int, ...]
    stacks_images: bool

    @property
    def medium(self) -> Medium:  # type: ignore[override]
        """See `Family`."""
        return self.sensed

    @property
    def config(self) -> Any:
        """See `Family`."""
        return self.network.config

    @cached_property
    def decoder_input(self) -> str | None:
        """See `Family`."""
        if hasattr(self.network.base_model, "get_rope_index"):
            return POSITIONS
        taken = inspect.signature(self.network.forward).parameters
        text = self.config.get_text_config()
        if PER_LAYER in taken and text.hidden_size_per_layer_input:
            return PER_LAYER
        both_ways = MODALITY_TYPES in taken and getattr(text, "use_bidirectional_attention", None) == "vision"
        return TOKEN_TYPES if both_ways or TOKEN_TYPES in taken else None

    @property
    def takes_ids(self) -> bool:
        """See `Family`: for embeddings of n-grams (Qwen4-exp), which transformers finds by comparing embeddings else."""
        return bool(getattr(self.config.get_text_config(), "ple_layer_ids", None))

    @property
    def bidirectional_prompts(self) -> bool:
        """See `Family`."""
        return self.config.model_type in _WITH_BIDIRECTIONAL_PROMPTS

    @property
    def image_token_id(self) -> int:
        """See `Family`."""
        return int(_token_of(self.medium, self.config))

    @property
    def rows_per_image(self) -> int:
        """See `Family`."""
        return self.rows

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """See `Family`."""
        return self.stacked

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """See `Family`."""
        return self.example.pixels[1:] if self.stacks_images else self.example.pixels

    def image_side(self) -> int | None:
        """See `Family`."""
        return self.example.side

    def joined_axis(self) -> int:
        """See `Family`."""
        return self.example.axis

    @property
    def row_count(self) -> int | str:
        """See `Family`."""
        return super().row_count if self.example.free_form is None else self.example.free_form.row_count

    def rows_of_image(self, shape: Sequence[int]) -> int:
        """See `Family`."""
        form = self.example.free_form
        return super().rows_of_image(shape) if form is None else form.rows(shape)

    @property
    def pictures(self) -> Mapping[str, tuple[int, ...]]:
        """See `Family`."""
        return self.example.pictures

    @property
    def input_description(self) -> str:
        """See `Family`."""
        if self.pictures:
            return f"for each image, the numbers of the processor's {' and '.join(self.pictures)}, flattened, one after the other"
        return super().input_description if self.example.free_form is None else self.example.free_form.input_description

    @property
    def free_axes(self) -> Mapping[int, DynamicSize]:
        """See `Family`."""
        return {} if self.example.free_form is None else self.example.free_form.axes

    @property
    def mixes_sizes(self) -> bool:
        """See `Family`; without a mask, transformers cannot tell where a shorter recording ends."""
        form = self.example.free_form
        return not isinstance(form, AnyLengthSound) or form.mask_name is not None

    def split(self, processed: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `Family`."""
        name = self.medium.input_name
        found = None if self.example.free_form is None else self.example.free_form.split(processed, name)
        if found is None:
            raise OptionError("the model's processor makes a video.", "Use images: video is not supported.")
        return tuple(image.astype(np.float32) for image in found)

    def known(self, shapes: Sequence[Sequence[int]]) -> Mapping[str, torch.Tensor]:
        """See `Family`."""
        if self.example.free_form is not None:
            return self.example.free_form.known(shapes)
        axis = int(self.example.nested)
        return {name: torch.cat([value] * len(shapes), axis) for name, value in self.example.known.items()}

    def encoder(self, network: Any) -> Encoder:
        """See `Family`."""
        return _encoder(self.medium, network, self.example)

    def reference_inputs(self, is_image: torch.Tensor, images: Sequence[torch.Tensor]) -> dict[str, Any]:
        """See `Family`."""
        taken = inspect.signature(self.network.forward).parameters
        of_prompt = torch.zeros_like(is_image) if self.bidirectional_prompts else is_image
        types = {TOKEN_TYPES: of_prompt.long(), MODALITY_TYPES: is_image.int()}
        given: dict[str, Any] = {name: value for name, value in types.items() if name in taken}
        if not images:
            return {name: value for name, value in given.items() if name == TOKEN_TYPES}
        if self.example.free_form is not None:
            joined = self.example.free_form.joined(images)
        elif self.stacks_images:
            joined = torch.stack(tuple(images))
        else:
            joined = torch.cat(tuple(images), dim=self.example.axis)
        return {
            **given,
            **self.example.named(self.medium.input_name, joined),
            **self.known([image.shape for image in images]),
        }

    def positions(self, ids: np.ndarray, shapes: Sequence[Sequence[int]]) -> np.ndarray:
        """See `Family`; the model's own code says them."""
        if self.decoder_input != POSITIONS:
            return super().positions(ids, shapes)
        if self.image_token_id not in ids:
            counted = np.arange(len(ids), dtype=np.int64)
            return np.broadcast_to(counted, (self.position_axes, 1, len(ids)))
        return self._indexed(torch.from_numpy(ids[None]), shapes)

    @cached_property
    def position_axes(self) -> int:
        """See `Family`."""
        image = torch.full((1, self.rows), self.image_token_id)
        return len(self._indexed(image, [self.example.pixels]))

    def _indexed(self, ids: torch.Tensor, shapes: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the positions of a prompt, as the model's own code finds them."""
        is_image = ids == self.image_token_id
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(is_image, dtype=torch.int64),
            MODALITY_TYPES: is_image.int(),
            **self.known(shapes),
        }
        index = self.network.base_model.get_rope_index
        taken = inspect.signature(index).parameters
        found, _ = index(**{name: value for name, value in given.items() if name in taken})
        positions: np.ndarray = found.numpy().astype(np.int64)
        return positions


def _features_of(medium: Medium, network: Any) -> Any:
    """Return what makes rows of an image or of a segment of sound; None where a model has no such function."""
    found = (getattr(each, _FUNCTIONS[medium.task], None) for each in (network.base_model, network))
    return next((each for each in found if each is not None), None)


def start_token_id(medium: Medium, config: Any) -> int | None:
    """Return the token that prompts have before each image or recording; None where the config has none."""
    found = getattr(config, "audio_start_token_id" if medium.hears else "vision_start_token_id", None)
    return None if found is None else int(found)


def _encoder(medium: Medium, network: Any, example: EncoderExample) -> Encoder:
    def encode(pixels: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        shape = pixels.shape
        known = {name: value for name, value in buffers.items() if name != CODE_TOKENS}
        if medium.hears and fills_up_sound(network):
            return (filled_up_sound(network, pixels),)
        if (form := example.free_form) is not None:
            known, pixels = form.for_encoder(pixels.shape, pixels.device), form.flat(pixels)
        with (
            _EveryImageIsReal(shape, alone=form is not None),
            positions_of_one_image(network),
            blocks_filled_up(network),
            codes_looked_up(network, buffers),
            windows_filled_up(network, *example.grid(shape)) as further,
        ):
            given = {**example.named(medium.input_name, pixels), **known, **further}
            found = _features_of(medium, network)(**given, return_dict=True)
        if isinstance(found.pooler_output, torch.Tensor) and found.pooler_output.ndim == 3:
            return (found.pooler_output,)
        layered = [_joined(rows) for rows in _further_rows(found)]
        # A model whose rows are all for layers adds them to zeros.
        first = _joined(found.pooler_output) if found.pooler_output is not None else torch.zeros_like(layered[0])
        return (first, *layered)

    return Encoder({**example.known, **code_tokens(network)}, encode)


def _further_rows(found: Any) -> list[Any]:
    """Return the rows of images for each of `Family.deepstack_layers`; if several are for one layer, the last ones."""
    further = list(getattr(found, "deepstack_features", None) or ())
    names_layers = further and isinstance(further[0], tuple) and isinstance(further[0][0], int)
    return list(dict(further).values()) if names_layers else further


def _deepstack_layers(config: Any, count: int) -> tuple[int, ...]:
    """Return `Family.deepstack_layers` of a model that gives rows for so many: those that its config names, or the first ones."""
    named = [layer for _, layer in getattr(config, "deepstack_layer_map", None) or ()]
    named += getattr(config, "spatial_target_layers", None) or ()
    return tuple(layer - 1 for layer in dict.fromkeys(named)) or tuple(range(count))


def _joined(rows: Any) -> torch.Tensor:
    """Return [rows, width] of what may be a list with the rows of each image."""
    if isinstance(rows, torch.Tensor):
        return rows.flatten(0, -2)
    return torch.cat([_joined(each) for each in rows])


class _EveryImageIsReal(TorchFunctionMode):
    """Reports that no pixel is 0, because some models drop images of zeros as padding of a batch.

    A single image of any size has no padding either: a mask of rows keeps and counts all of them.
    """

    def __init__(self, shape: Sequence[int], *, alone: bool) -> None:
        super().__init__()
        self._picture = tuple(shape[-3:])
        self._alone = alone

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _EQUALS and isinstance(args[1], float) and args[1] == 0.0:
            asked = args[0]
            if tuple(asked.shape[-3:]) == self._picture:
                return torch.zeros(tuple(asked.shape), dtype=torch.bool, device=asked.device)
        if self._alone and func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            return args[0].flatten(0, args[1].ndim - 1)
        if self._alone and func is torch.Tensor.sum and _is_mask(args[0]) and (kwargs or {}).get("dim") == -1:
            return torch.tensor([args[0].shape[-1]], device=args[0].device)
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


_EQUALS = (torch.Tensor.__eq__, torch.Tensor.eq, torch.eq)


def feature_family(
    medium: Medium,
    config: Any,
    image_size: int | None,
    trust_remote_code: bool = False,
    processed_size: int | None = None,
) -> FeatureFamily:
    """Return how a model sees or hears.

    Args:
        medium: images or sound.
        config: transformers config.
        image_size: height and width of the images in pixels, for models that take any; None leaves it open where images
            are grids of patches (but see `_OF_ONE_SIZE`), and else takes the model's own, or 448.
        trust_remote_code: allow code that comes with the model.
        processed_size: what the model's processor makes of images, for models whose config does not say their size.

    Raises:
        UnknownArchitectureError: the model does not make rows of embeddings, or in no way that is known here.
        OptionError: a size is given, and the model has one of its own; or it does not fit the model's patches.
    """
    key = _Key(config, config.to_json_string(use_diff=False))
    return _family_of(medium, key, image_size, trust_remote_code, processed_size)


@dataclass(frozen=True)
class _Key:
    """A config, equal to others with the same text."""

    config: Any
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=4)
def _family_of(
    medium: Medium, key: _Key, image_size: int | None, trust_remote_code: bool, processed_size: int | None
) -> FeatureFamily:
    config = key.config
    network: Any = instantiate(MULTIMODAL_MODEL, config, torch.float32, "eager", "eager", trust_remote_code).to("meta")
    features = _features_of(medium, network)
    if features is None or _token_of(medium, config) is None:
        raise UnknownArchitectureError(
            f"models of type {config.model_type!r} do not replace tokens with {medium.noun} features.",
            "Use --task text-generation for the text model.",
        )
    refusals: list[Exception] = []
    parameters = inspect.signature(features).parameters
    if medium.hears and SAMPLES in parameters:
        medium = replace(medium, input_name=SAMPLES)
    for example in _examples(medium, network, parameters, image_size, processed_size):
        try:
            with torch.no_grad():
                encoder = EncoderModule(network, _encoder(medium, network, example))
                found = encoder(torch.empty(example.pixels, device="meta"))
        except Exception as error:  # models raise exceptions of any type for a wrong shape
            refusals.append(error)
            continue
        stacks = not example.known and (len(example.pixels) == 4 or bool(example.pictures)) and found[0].ndim == 3
        rows = found[0].flatten(0, -2).shape[0]
        if example.free_form is not None and rows != example.free_form.rows(example.pixels):
            refusals.append(ValueError(f"{rows} rows, where {example.free_form.row_count} says otherwise"))
            continue
        if image_size is None and not example.is_free and config.model_type not in _OF_ONE_SIZE:
            example, rows = _freed(medium, network, example) or (example, rows)
        return FeatureFamily(medium, network, example, rows, _deepstack_layers(config, len(found) - 1), stacks)
    tried = "; ".join(map(str, refusals))
    raise UnknownArchitectureError(
        f"models of type {config.model_type!r}: {_FUNCTIONS[medium.task]} does not run for one {medium.noun}: {tried}.",
        "Use --task text-generation for the text model.",
    ) from refusals[0]


def _freed(medium: Medium, network: Any, example: EncoderExample) -> tuple[EncoderExample, int] | None:
    """Return how images of any size are passed, and the rows of one; None if the model does not run so, or counts otherwise."""
    freed = example.freed()
    if freed.free_form is None:
        return None
    try:
        with torch.no_grad():
            found = EncoderModule(network, _encoder(medium, network, freed))(torch.empty(freed.pixels, device="meta"))
    except Exception:  # models raise exceptions of any type; it runs for one size
        return None
    rows = found[0].flatten(0, -2).shape[0]
    return (freed, rows) if rows == freed.free_form.rows(freed.pixels) else None


def _recordings(medium: Medium, network: Any, parameters: Mapping[str, inspect.Parameter]) -> Iterator[EncoderExample]:
    """Return how recordings of any length are passed, where the encoder runs for them."""
    for form in recordings(network.config, parameters):
        rule: RowCount | int | None
        if fills_up_sound(network):
            rule = int(network.config.audio_soft_tokens_per_image)
        else:
            count = partial(_rows_of_recording, medium, network, form)
            with _one_layer_each(network):
                rule = find_row_count(count, form.shape[form.axis], form.far)
            rule = rule or find_row_count(count, form.shape[form.axis], form.far)
        if rule is not None:
            found = replace(form, row_rule=rule)
            yield EncoderExample(found.shape, form=found, is_free=True)


def _rows_of_recording(medium: Medium, network: Any, form: AnyLengthSound, length: int) -> int:
    """Return how many rows a recording of some length becomes; 0 if the encoder does not run for it."""
    shape = (*form.shape[: form.axis], length, *form.shape[form.axis + 1 :])
    encoder = _encoder(medium, network, EncoderExample(shape, form=form, is_free=True))
    try:
        with torch.no_grad():
            (found,) = EncoderModule(network, encoder)(torch.empty(shape, device="meta"))
    except Exception:  # models raise exceptions of any type for a length that they do not take
        return 0
    return int(found.flatten(0, -2).shape[0])


@contextmanager
def _one_layer_each(network: Any) -> Iterator[None]:
    """Let stacks of layers have one layer, for the length of the block, if their layers give as many rows as they take."""
    lists = [each for each in network.modules() if isinstance(each, torch.nn.ModuleList) and len(each) > 1]
    with ExitStack() as stack:
        for layers in lists:
            if not any(_has_stride(module) for module in layers.modules()):
                stack.enter_context(mock.patch.object(layers, "_modules", {"0": layers[0]}))
        yield


def _has_stride(module: Any) -> bool:
    stride = getattr(module, "stride", 1)
    return any(step != 1 for step in (stride if isinstance(stride, tuple) else (stride,)))


def _examples(
    medium: Medium,
    network: Any,
    parameters: Mapping[str, inspect.Parameter],
    image_size: int | None,
    processed_size: int | None,
) -> Iterator[EncoderExample]:
    config = network.config
    if medium.hears:
        if image_size is not None:
            raise OptionError(f"--image-size {image_size}: this model takes no images.", "Omit it.")
        return chain(_recordings(medium, network, parameters), sound_examples(config, parameters))
    if not takes_any_size(config, parameters):
        own = own_image_size(config)
        if own is None:
            image_size = image_size or processed_size
        elif image_size is not None:
            raise OptionError(f"--image-size {image_size}: this model's images have {own} pixels.", "Omit it.")
    return image_examples(config, parameters, image_size)


def _token_of(medium: Medium, config: Any) -> Any:
    names = _TOKEN_FIELDS[medium.task]
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


__all__ = ["FeatureFamily", "feature_family"]

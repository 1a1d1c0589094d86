"""What a single-pass model is given: names, axes and kinds of values, read off its class and its config.

In: a `Head`, a network, the size of images. Out: a `Reading`, which makes example tensors of any size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

import numpy as np
from torch import nn

from generic_export.errors import UnknownArchitectureError
from t2n_llm.tasks.heads.table import Head, Reads
from t2n_llm.tasks.names import AUDIO_XVECTOR, IMAGE_CLASSIFICATION

BATCH, STEPS, TEXTS, LENGTH, POINTS = "B", "S", "N", "T", "K"

IMAGE_SIDE = 224  # of models that take any size, where neither the user nor their processor says one

_TRACED = {BATCH: 3, STEPS: 13, TEXTS: 2, POINTS: 2}
_SAMPLES, _FRAMES = 4111, 43  # of sound, while it is captured


_FRAMES_OF_A_VIDEO = 16


class Values(Enum):
    """What an input holds."""

    IDS = "ids of tokens"
    MASK = "1 for tokens, 0 for padding"
    MARKS = "1 for tokens with global attention"
    TYPES = "0 in the first text of a pair, 1 in the second"
    NUMBERS = "output of the model's processor"
    POINTS = "positions in pixels, x before y"
    LABELS = "1 for a point inside, 0 for one outside"


_INTEGERS = frozenset({Values.IDS, Values.MASK, Values.MARKS, Values.TYPES, Values.LABELS})


@dataclass(frozen=True)
class Input:
    """One input of a graph.

    Attributes:
        name: of the graph, and of the model's own keyword.
        axes: sizes, or symbols of those that are free.
        values: what it holds.
        below: what ids and positions stay below.
        ends: the id that every text ends with; None where it may end with any.
    """

    name: str
    axes: tuple[str | int, ...]
    values: Values
    below: int = 0
    ends: int | None = None

    @property
    def is_integer(self) -> bool:
        """Whether its values are int64; else they have the element type of activations."""
        return self.values in _INTEGERS

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape for sizes of the symbols."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)

    def ended(self, ids: np.ndarray) -> np.ndarray:
        """Return ids [..., S] of whole texts whose last one is `ends`, which stands nowhere else."""
        if self.ends is None:
            return ids
        ids = np.where(ids == self.ends, (self.ends + 1) % self.below, ids)
        ids[..., -1] = self.ends
        return ids

    def random(self, sizes: Mapping[str, int], generator: np.random.Generator) -> np.ndarray:
        """Return int64 or f32 values; masks hide nothing."""
        shape = self.shape(sizes)
        if self.values is Values.IDS:
            return self.ended(generator.integers(min(9, self.below - 1), self.below, size=shape))
        if self.values is Values.MARKS:
            return np.broadcast_to(np.arange(shape[-1]) < 2, shape).astype(np.int64)
        if self.values is Values.TYPES:
            return np.broadcast_to(np.arange(shape[-1]) * 2 >= shape[-1], shape).astype(np.int64)
        if self.is_integer:
            return np.ones(shape, np.int64)
        if self.values is Values.POINTS:
            return (generator.random(shape) * self.below).astype(np.float32)
        return generator.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Reading:
    """The inputs of a model.

    Attributes:
        inputs: in the order of the graph.
        lengths: how long sound or series are, while the model is captured and in its checks; none where that is fixed.
        reads_batches: whether several can be read at once.
    """

    inputs: tuple[Input, ...]
    lengths: tuple[int, ...] = ()
    reads_batches: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs."""
        return tuple(each.name for each in self.inputs)

    @property
    def ids(self) -> Input:
        """The one of token ids, of what reads texts."""
        return next(each for each in self.inputs if each.values is Values.IDS)

    @property
    def traced(self) -> dict[str, int]:
        """Sizes while the model is captured: only hints, that never reach the graph."""
        lengths = {LENGTH: self.lengths[0]} if self.lengths else {}
        return {**_TRACED, **lengths, BATCH: _TRACED[BATCH] if self.reads_batches else 1}

    @property
    def others(self) -> tuple[dict[str, int], ...]:
        """Sizes that differ from those in every symbol: what the checks ask for."""
        lengths = self.lengths[1:] or (0, 0)
        batches = (1, 2) if self.reads_batches else (1, 1)
        return tuple(
            {BATCH: batch, STEPS: steps, TEXTS: texts, POINTS: points, LENGTH: length}
            for batch, steps, texts, points, length in zip(batches, (9, 7), (3, 4), (1, 3), lengths, strict=True)
        )

    def axes(self, each: Input) -> tuple[str | int, ...]:
        """Return the axes of an input, the batch 1 where only one can be read at once."""
        if self.reads_batches:
            return each.axes
        return tuple(1 if axis == BATCH else axis for axis in each.axes)

    def random(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
        """Return values for every input, by name."""
        generator = np.random.default_rng(seed)
        return {each.name: each.random(sizes, generator) for each in self.inputs}


def reading_of(head: Head, network: nn.Module, image_size: tuple[int, int]) -> Reading:
    """Return what a network is given.

    Args:
        head: the task.
        network: transformers' model for it.
        image_size: height and width of images in pixels.

    Raises:
        UnknownArchitectureError: its class wants something that nobody here knows how to make.
    """
    inputs, lengths = _READERS[head.reads](head, network, image_size)
    wanted = [each.name for each in inputs]
    missing = _required(network).difference(wanted)
    if missing:
        raise UnknownArchitectureError(
            f"{type(network).__name__} needs {', '.join(sorted(missing))}, which --task {head.name} does not provide.",
            "Choose another --task.",
        )
    return Reading(tuple(inputs), lengths)


_Made = tuple[Sequence[Input], tuple[int, ...]]
_SOUND_LENGTHS = {_SAMPLES: (_SAMPLES, 6400, 5003), _FRAMES: (_FRAMES, 64, 37)}


def _text(head: Head, network: Any, image_size: tuple[int, int], leading: tuple[str, ...] = (BATCH,)) -> _Made:
    del image_size
    ids, *others = _tokens(network, leading, types=head.token_types)
    return [replace(ids, ends=_end(head, network)), *others, *_marks(head, network, leading)], ()


def _choices(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    return _text(head, network, image_size, (BATCH, TEXTS))


def _tokens(network: Any, leading: tuple[str, ...], *, types: bool) -> Iterator[Input]:
    known, config = _parameters(network), network.config.get_text_config()
    ids = "input_ids" if "input_ids" in known else _main(network)
    axes = (*leading, STEPS)
    yield Input(ids, axes, Values.IDS, _vocabulary(config))
    if "attention_mask" in known:
        yield Input("attention_mask", axes, Values.MASK)
    if types and "token_type_ids" in known and int(getattr(config, "type_vocab_size", 0) or 0) > 1:
        yield Input("token_type_ids", axes, Values.TYPES)


def _end(head: Head, network: Any) -> int | None:
    """Encoder-decoders classify a text by what they say of its last end token: all of a batch must have as many of them."""
    classifies = head.kind.auto_class == "AutoModelForSequenceClassification" and network.config.is_encoder_decoder
    end = getattr(network.config, "eos_token_id", None)
    return end if classifies and isinstance(end, int) else None


def _marks(head: Head, network: Any, leading: tuple[str, ...]) -> Iterator[Input]:
    """Which tokens are the question: left out, Longformer looks for separators by value, exactly three a text."""
    if head.marks and _GLOBAL in _parameters(network):
        yield Input(_GLOBAL, (*leading, STEPS), Values.MARKS)


_GLOBAL = "global_attention_mask"


def _image(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    if _main(network) == "input_ids":  # an image as a row of colours
        return list(_tokens(network, (BATCH,), types=False)), ()
    # A classifier of images may share its config with one of videos (Perceiver).
    frames = () if head.name == IMAGE_CLASSIFICATION else _frames(network)
    return [*_task(network), _pixels(network, (BATCH, *frames), image_size)], ()


def _frames(network: Any) -> tuple[int, ...]:
    """Return how many frames a network reads at once, where it does."""
    if _main(network) == "pixel_values_videos":
        return (first_of(network.config, "num_frames", "frames_per_clip", otherwise=_FRAMES_OF_A_VIDEO),)
    frames = first_of(network.config, "num_frames", otherwise=0)
    return (frames,) if frames else ()


def _task(network: Any) -> Iterator[Input]:
    """Yield the words that say what is to be found in an image, where a network asks for them (OneFormer)."""
    if "task_inputs" in _required(network):
        config = network.config
        yield Input("task_inputs", (BATCH, config.task_seq_len), Values.IDS, config.text_encoder_vocab_size)


def _pixels(network: Any, leading: tuple[str | int, ...], image_size: tuple[int, int]) -> Input:
    known = _parameters(network)
    name = next((each for each in ("pixel_values", "pixel_values_videos") if each in known), _main(network))
    return Input(name, (*leading, _channels(network.config), *image_size), Values.NUMBERS)


def _image_and_texts(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    del head
    return [*_tokens(network, (TEXTS,), types=False), _pixels(network, (BATCH, *_frames(network)), image_size)], ()


def _prompted_image(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    pixels, _ = _image(head, network, image_size)
    points = Input("input_points", (BATCH, 1, POINTS, 2), Values.POINTS, min(image_size))
    return [*pixels, points, Input("input_labels", (BATCH, 1, POINTS), Values.LABELS)], ()


def _video(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    del head
    frames = first_of(network.config, "num_frames", "frames_per_clip", otherwise=_FRAMES_OF_A_VIDEO)
    return [_pixels(network, (BATCH, frames), image_size)], ()


def _sound(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    del image_size
    config, name = network.config, _main(network)
    width = first_of(config, *_FEATURE_WIDTHS, otherwise=0)
    if name == "input_values" and not hasattr(config, "max_length"):
        longer = _unheard_samples(config) if head.name == AUDIO_XVECTOR else 0
        lengths = tuple(length + longer for length in _SOUND_LENGTHS[_SAMPLES])
        one_channel = (1,) if "padding_mask" in _parameters(network) else ()  # as EnCodec's extractor makes it
        return [Input(name, (BATCH, *one_channel, LENGTH), Values.NUMBERS)], lengths
    if name == "input_values":  # spectrograms of one length
        return [Input(name, (BATCH, config.max_length, width), Values.NUMBERS)], ()
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):  # the same, its channels first
        return [Input(name, (BATCH, width, 2 * config.max_source_positions), Values.NUMBERS)], ()
    return [Input(name, (BATCH, LENGTH, _stacked_width(network) or width), Values.NUMBERS)], _SOUND_LENGTHS[_FRAMES]


def _stacked_width(network: nn.Module) -> int:
    """Return the width of frames that stand several beside each other (Granite speech); 0 where one stands alone."""
    layers = (module for name, module in network.named_modules() if name.endswith("input_linear"))
    return next((int(layer.in_features) for layer in layers if isinstance(layer, nn.Linear)), 0)


def _unheard_samples(config: Any) -> int:
    """Return for how many samples no frame is left after the layers that look at several: one frame alone has no deviation."""
    frames = sum((size - 1) * step for size, step in zip(config.tdnn_kernel, config.tdnn_dilation, strict=True))
    return frames * prod(config.conv_stride)


_FEATURE_WIDTHS = ("num_mel_bins", "feature_projection_input_dim", "feature_size", "input_dim")


def _series(head: Head, network: Any, image_size: tuple[int, int]) -> _Made:
    del head, image_size
    config = network.config
    channels = first_of(config, "num_input_channels", "input_size", otherwise=0)
    steps = first_of(config, "context_length", otherwise=32)
    return [Input(_main(network), (BATCH, steps, *((channels,) if channels else ())), Values.NUMBERS)], ()


_READERS: Mapping[Reads, Callable[[Head, Any, tuple[int, int]], _Made]] = {
    Reads.TEXT: _text,
    Reads.CHOICES: _choices,
    Reads.IMAGE: _image,
    Reads.IMAGE_AND_TEXTS: _image_and_texts,
    Reads.PROMPTED_IMAGE: _prompted_image,
    Reads.VIDEO: _video,
    Reads.SOUND: _sound,
    Reads.SERIES: _series,
}


# --- what classes and configs say ---------------------------------------------------------------


def _parameters(network: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(network.forward).parameters


def _required(network: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = _parameters(network).items()
    return {name for name, each in parameters if each.default is each.empty and each.kind not in kinds}


def _main(network: Any) -> str:
    name = network.main_input_name
    return str(name if isinstance(name, str) else name[0])


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a config and the parts of it that see or hear."""
    yield config
    for name in ("vision_config", "backbone_config", "encoder_config", "audio_config", "image_model_config"):
        part = getattr(config, name, None)
        if hasattr(part, "model_type"):
            yield from parts_of(part)


def first_of(config: Any, *names: str, otherwise: int) -> int:
    """Return the first of several numbers that a config or a part of it has."""
    found = (getattr(part, name, None) for part in parts_of(config) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), otherwise)


def _channels(config: Any) -> int:
    return first_of(config, "num_channels", "in_channels", "in_chans", otherwise=3)


def _vocabulary(config: Any) -> int:
    return int(getattr(config, "vocab_size", 0) or 256)


__all__ = [
    "BATCH",
    "IMAGE_SIDE",
    "LENGTH",
    "POINTS",
    "STEPS",
    "TEXTS",
    "Input",
    "Reading",
    "Values",
    "first_of",
    "parts_of",
    "reading_of",
]

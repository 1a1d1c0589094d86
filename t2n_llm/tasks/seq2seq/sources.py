"""What an encoder reads: token ids, features of sound, samples, pixels; by the family's own argument names.

In: a transformers config. Out: a `SourceForm`: inputs of the encoder's graph, and sizes to try it with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch.export import Dim

from generic_export.errors import UnknownArchitectureError
from t2n_llm.tasks.seq2seq.adapters import COMPOSER

BATCH, LENGTH = "B", "T"
"""Symbols of a source's shape: how many sources, and how long they are."""

ENCODER_MASK = "attention_mask"
_HINT = 9  # of a length; it never reaches the graph
_FLORENCE_PIXELS = 768  # height and width; its config has no size
_COLOURS = 3  # where a config counts none
_ROW = 4  # patches in a row of a random image


@dataclass(frozen=True)
class SourceInput:
    """One input of the encoder.

    Attributes:
        name: the argument of transformers' forward.
        shape: sizes; `B` and `T` stand for the batch and the length.
        vocabulary: how many token ids there are; None for an input of floats.
        places: how many of the first columns are no features, but the row and column of a patch in an image, from 1 on.
    """

    name: str
    shape: tuple[int | str, ...]
    vocabulary: int | None = None
    places: int = 0

    def sizes(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the shape for a number of sources of one length."""
        known = {BATCH: batch, LENGTH: length}
        return tuple(known[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def meta(self, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an example without values; `dtype` is that of floats."""
        kind = torch.int64 if self.vocabulary is not None else dtype
        return torch.zeros(self.sizes(batch, length), dtype=kind, device="meta")

    def random(self, generator: np.random.Generator, batch: int, length: int) -> np.ndarray:
        """Return random ids, int64, or floats of a standard normal distribution, f32."""
        sizes = self.sizes(batch, length)
        if self.vocabulary is not None:
            return generator.integers(3, self.vocabulary, size=sizes)
        source = generator.standard_normal(sizes).astype(np.float32)
        steps = np.arange(length)
        for column, place in enumerate((steps // _ROW, steps % _ROW)[: self.places]):
            source[..., column] = place + 1
        return source


@dataclass(frozen=True)
class SourceForm:
    """How sources enter the encoder.

    Attributes:
        inputs: what it reads.
        masked: whether sources of several lengths can be in one batch: a mask int64 [B, T] tells them from padding.
        wants_mask: whether the encoder needs a mask also where nothing is padding.
        unit: steps of `T` of which the encoder makes about one position; 1 for tokens.
        least: the smallest `T` that is read; 0 where nothing is known of one.
        most: the largest; None where no table of positions ends.
    """

    inputs: tuple[SourceInput, ...]
    masked: bool = False
    wants_mask: bool = False
    unit: int = 1
    least: int = 0
    most: int | None = None

    @property
    def dynamic(self) -> bool:
        """Whether sources have any length."""
        return any(LENGTH in each.shape for each in self.inputs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Two lengths to try, neither of which is the traced one; one where all sources are of one size."""
        if not self.dynamic:
            return (0,)
        lengths = max(5 * self.unit, self.least), 17 * self.unit
        return lengths if self.most is None else (min(lengths[0], self.most // 2), min(lengths[1], self.most))

    @property
    def hint(self) -> int:
        """A length to trace with."""
        hint = max(_HINT * self.unit, self.least + 1)
        return hint if self.most is None else min(hint, self.most - 1)

    def typical(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        """Return one source of usual values, by name: the tokens where texts are read, else random features or pixels."""
        generator = np.random.default_rng(0)
        given = {each.name: each.random(generator, 1, self.lengths[-1]) for each in self.inputs}
        for each in self.inputs:
            if each.vocabulary is not None and each.shape == (BATCH, LENGTH):
                # The decoder's vocabulary may be the larger one.
                given[each.name] = np.array([tokens[: self.most]], np.int64) % each.vocabulary
        return given

    def axes(self, shape: tuple[int | str, ...], *, batched: bool) -> dict[int, str | Dim]:
        """Return the symbolic axes of an input of the encoder; the batch is one of them when `batched`."""
        bounded = self.least or self.most is not None
        length = Dim(LENGTH, min=self.least or None, max=self.most) if bounded else LENGTH
        return {
            axis: length if dim == LENGTH else dim
            for axis, dim in enumerate(shape)
            if isinstance(dim, str) and (batched or dim != BATCH)
        }


def _text(vocabulary: Callable[[Any], int]) -> Callable[[Any], SourceForm]:
    def form(config: Any) -> SourceForm:
        return SourceForm((SourceInput("input_ids", (BATCH, LENGTH), int(vocabulary(config))),), masked=True)

    return form


def _masked_text(config: Any) -> SourceForm:
    return replace(_text(lambda each: each.vocab_size)(config), wants_mask=True)


def _features(width: Callable[[Any], int]) -> Callable[[Any], SourceForm]:
    """Frames of sound, [B, T, width]."""

    def form(config: Any) -> SourceForm:
        return SourceForm((SourceInput("input_features", (BATCH, LENGTH, int(width(config)))),), unit=16)

    return form


def _projected_features(config: Any) -> SourceForm:
    """The same of SeamlessM4T, of whose kinds of positions one is a table of distances."""
    form = _features(lambda each: each.feature_projection_input_dim)(config)
    return replace(form, most=config.max_source_positions) if config.position_embeddings_type == "relative" else form


def _shrunk_features(config: Any) -> SourceForm:
    """Frames of sound before convolutions that each halve them; a table has that many positions, after the padding token's."""
    positions = config.max_source_positions + 1 - config.pad_token_id
    shrunk = 2**config.num_conv_layers
    frames = SourceInput("input_features", (BATCH, LENGTH, config.input_feat_per_channel * config.input_channels))
    return SourceForm((frames,), unit=4 * shrunk, most=positions * shrunk)


def _samples(kernels: Sequence[int], strides: Sequence[int]) -> SourceForm:
    """Sound as it was sampled, [B, T], before a stack of convolutions without padding; enough of it for two positions."""
    least = 2
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        least = (least - 1) * stride + kernel
    return SourceForm((SourceInput("input_values", (BATCH, LENGTH)),), unit=prod(strides), least=least)


def _moonshine(config: Any) -> SourceForm:
    del config  # its convolutions are the same in every size
    return _samples((127, 7, 3), (64, 3, 2))


def _framed(config: Any) -> SourceForm:
    """Sound as it was sampled, [B, T], in whole frames of some milliseconds, of which two convolutions make a quarter."""
    encoder = config.encoder_config
    frame = round(encoder.sample_rate * encoder.frame_ms / 1000)
    samples = SourceInput("input_values", (BATCH, LENGTH))
    return SourceForm((samples,), unit=4 * frame, least=8 * frame)


def _heard(config: Any) -> SourceForm:
    """Sound as the encoder's own family reads it: samples before convolutions, or features."""
    part = getattr(config, "encoder", config)
    if not hasattr(part, "conv_kernel"):
        return _features(lambda _: part.feature_projection_input_dim)(config)
    form = _samples(part.conv_kernel, part.conv_stride)
    if not getattr(part, "add_adapter", False):
        return form
    shrunk = part.adapter_stride**part.num_adapter_layers
    return replace(form, unit=form.unit * shrunk, least=form.least * shrunk)


def _log_mel(config: Any) -> SourceForm:
    """Thirty seconds of log-mel frames, as Whisper has them: two frames for each position of its encoder."""
    frames = 2 * int(config.max_source_positions)
    return SourceForm((SourceInput("input_features", (BATCH, int(config.num_mel_bins), frames)),))


def _pixels(config: Any) -> SourceForm:
    """Images of one size."""
    part = getattr(config, "encoder", None) or getattr(config, "vision_config", None) or config
    size = part.image_size
    height, width = (size, size) if isinstance(size, int) else size
    colours = int(getattr(part, "num_channels", _COLOURS))
    return SourceForm((SourceInput("pixel_values", (BATCH, colours, int(height), int(width))),))


def _prompted_pixels(config: Any) -> SourceForm:
    """Images of one size, and a prompt of any length (Florence-2)."""
    vision = config.vision_config
    size = getattr(vision, "image_size", None) or _FLORENCE_PIXELS
    prompt = SourceInput("input_ids", (BATCH, LENGTH), int(config.text_config.vocab_size))
    return SourceForm((prompt, SourceInput("pixel_values", (BATCH, int(vision.in_channels), size, size))))


def _arranged(config: Any) -> SourceForm:
    """Frames of sound [B, T, D] and who is to arrange them (Pop2Piano)."""
    frames = SourceInput("input_features", (BATCH, LENGTH, int(config.d_model)))
    return SourceForm((frames, SourceInput(COMPOSER, (BATCH,), int(config.composer_vocab_size))))


def _patches(config: Any) -> SourceForm:
    """Patches of an image with their row and column, [B, T, 2 + C x P x P], of which some are padding (Pix2Struct)."""
    width = 2 + int(config.vision_config.patch_embed_hidden_size)
    patches = SourceInput("flattened_patches", (BATCH, LENGTH, width), places=2)
    return SourceForm((patches,), masked=True)


def _of_encoder(config: Any) -> int:
    return int(config.encoder.vocab_size)


_FORMS: Mapping[str, Callable[[Any], SourceForm]] = {
    "encoder-decoder": _text(_of_encoder),
    "fsmt": _text(lambda config: config.src_vocab_size),
    "t5gemma": _text(_of_encoder),
    "t5gemma2": _text(lambda config: config.encoder.text_config.vocab_size),
    "longt5": _masked_text,
    "switch_transformers": _masked_text,
    "whisper": _log_mel,
    "canary": _features(lambda config: config.encoder_config.num_mel_bins),
    "cohere_asr": _features(lambda config: config.encoder_config.num_mel_bins),
    "speech_to_text": _shrunk_features,
    "pop2piano": _arranged,
    "moonshine": _moonshine,
    "moonshine_streaming": _framed,
    "speecht5": _heard,
    "speech-encoder-decoder": _heard,
    "vision-encoder-decoder": _pixels,
    "blip": _pixels,
    "git": _pixels,
    "florence2": _prompted_pixels,
    "pp_formulanet": _pixels,
    "pix2struct": _patches,
}
"""Families whose sources are no token ids of the config's own vocabulary, by `model_type`."""

_SPEECH_FORMS: Mapping[str, Callable[[Any], SourceForm]] = {
    "seamless_m4t": _projected_features,
    "seamless_m4t_v2": _projected_features,
}
"""The same for families that read text or sound, when they read sound."""


def source_form(config: Any, *, main_input: str) -> SourceForm:
    """Return how a model's sources enter its encoder.

    Args:
        config: transformers config.
        main_input: the argument that the model's class reads first (`main_input_name`).

    Raises:
        UnknownArchitectureError: nobody has said yet.
    """
    kind = str(config.model_type)
    if main_input == "input_features" and kind in _SPEECH_FORMS:
        return _SPEECH_FORMS[kind](config)
    if kind in _FORMS:
        return _FORMS[kind](config)
    if main_input == "input_ids" and hasattr(config, "vocab_size"):
        return _text(lambda each: each.vocab_size)(config)
    raise UnknownArchitectureError(
        f"the encoder input of {config.model_type!r} ({main_input}) is not supported.",
        "Add it to t2n_llm/tasks/seq2seq/sources.py, or export the encoder with generic_export.export_model_to_nnef.",
    )

"""What an encoder-decoder of the zoo is given to generate from: random text, sound or an image, as its config sizes them.

In: a tiny model. Out: keyword arguments of `generate`, a batch of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from generic_export.errors import OptionError
from t2n_llm.source.small_sizes import VOCABULARY
from t2n_llm.tasks.multimodal.families import family_of

_STEPS = 12
_FRAMES = 64
_SAMPLES = 4000
_WIDTH = 16
_IMAGE = 64
_CHANNELS_FIRST = frozenset({"whisper"})  # the others have the frames before what was measured in each


def source_inputs(model: Any) -> dict[str, Any]:
    """Return what a model's encoder reads, by name.

    Args:
        model: of transformers; its `main_input_name` says what it reads.

    Raises:
        NotImplementedError: nobody knows how to make that input.
    """
    if model.config.model_type in _OWN:
        return _OWN[model.config.model_type](model)
    encoder = getattr(model, "encoder", None)
    name = str(model.main_input_name)
    name = str(getattr(encoder, "main_input_name", name)) if name == "inputs" else name  # of an encoder of any kind
    if name not in _MAKERS:
        raise NotImplementedError(f"no tiny input is defined for {name!r} of {type(model).__name__}")
    return {name: _MAKERS[name](model.config), **_beside(name)}


def tiny_image_size(config: Any, task: str | None = None) -> int | None:
    """Return the height of the images of a model that has to be given one; None where it has its own, or reads any size."""
    try:
        family_of(config, _IMAGE, task)
    except OptionError:
        return None
    return None if family_of(config, task=task).free_axes else _IMAGE


def _beside(name: str) -> dict[str, torch.Tensor]:
    return {"attention_mask": torch.ones((1, _STEPS), dtype=torch.int64)} if name == "input_ids" else {}


def _ids(config: Any) -> torch.Tensor:
    parts = (config.get_text_config(decoder=False), getattr(config, "encoder", None))
    vocabulary = next((size for part in parts if (size := getattr(part, "vocab_size", None))), VOCABULARY)
    return torch.arange(9, 9 + _STEPS).remainder(vocabulary)[None]


def _features(config: Any) -> torch.Tensor:
    part = _encoder(config)
    width = _first_of(part, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
    frames = 2 * part.max_source_positions if part.model_type in _CHANNELS_FIRST else _FRAMES
    shape = (1, width, frames) if part.model_type in _CHANNELS_FIRST else (1, frames, width)
    return torch.randn(shape)


def _waveform(config: Any) -> torch.Tensor:
    del config
    return torch.randn(1, _SAMPLES)


def _image(config: Any) -> torch.Tensor:
    part = _encoder(config)
    size = _first_of(part, "image_size", otherwise=64)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(1, _first_of(part, "num_channels", "in_channels", otherwise=3), height, width)


def _patches(config: Any) -> torch.Tensor:
    part = _encoder(config)
    rows = torch.arange(16)
    places = torch.stack((rows // 4 + 1, rows % 4 + 1), dim=1).float()
    return torch.cat((places, torch.randn(16, part.patch_embed_hidden_size)), dim=1)[None]


def _image_alone(model: Any) -> dict[str, Any]:
    """GIT: a decoder of text, which begins by itself after an image."""
    return {"pixel_values": _image(model.config)}


def _image_and_prompt(model: Any) -> dict[str, Any]:
    """Florence-2: a placeholder for each row of the image, then a prompt."""
    pixels = _image(model.config)
    with torch.no_grad():
        rows = model.get_image_features(pixels).pooler_output.shape[1]
    ids = torch.cat((torch.full((1, rows), model.config.image_token_id), _ids(model.config)), dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _sound_and_arranger(model: Any) -> dict[str, Any]:
    """Pop2Piano: which of its arrangers is meant stands in the checkpoint's generation config."""
    generation = copy.deepcopy(model.generation_config)
    generation.composer_to_feature_token = {
        f"composer{row + 1}": row for row in range(model.config.composer_vocab_size)
    }
    return {"input_features": torch.randn(1, _STEPS, model.config.d_model), "generation_config": generation}


def _page(model: Any) -> dict[str, Any]:
    """UDOP: words, where they stand on the page, and its image."""
    ids = _ids(model.config)
    corners = torch.arange(_STEPS)[None, :, None] / (2 * _STEPS)
    boxes = torch.cat((corners, corners, corners + 0.3, corners + 0.3), dim=2)
    return {"input_ids": ids, "bbox": boxes, "pixel_values": _image(model.config)}


def _encoder(config: Any) -> Any:
    """Return the part of a config that sizes what is seen or heard."""
    parts = (getattr(config, name, None) for name in ("vision_config", "audio_config", "encoder", "encoder_config"))
    return next((part for part in parts if hasattr(part, "model_type")), config)


def _first_of(config: Any, *names: str, otherwise: int = _WIDTH) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), otherwise)


_MAKERS: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _ids,
    "input_features": _features,
    "input_values": _waveform,
    "pixel_values": _image,
    "flattened_patches": _patches,
}

_OWN: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "florence2": _image_and_prompt,
    "git": _image_alone,
    "pop2piano": _sound_and_arranger,
    "udop": _page,
}
"""Families that read more than one thing, or something else than their class says, by model type."""

__all__ = ["source_inputs"]

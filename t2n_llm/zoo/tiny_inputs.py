"""What an encoder-decoder of the zoo is given to generate from: random text, sound or an image, as its config sizes them.

In: a tiny model. Out: keyword arguments of `generate`, a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from t2n_llm.source.small_sizes import VOCABULARY

_STEPS = 12
_FRAMES = 64
_SAMPLES = 4000
_WIDTH = 16
_CHANNELS_FIRST = frozenset({"whisper"})  # the others have the frames before what was measured in each


def source_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return what a model's encoder reads, by name.

    Args:
        model: of transformers; its `main_input_name` says what it reads.

    Raises:
        NotImplementedError: nobody knows how to make that input.
    """
    encoder = getattr(model, "encoder", None)
    name = str(model.main_input_name)
    name = str(getattr(encoder, "main_input_name", name)) if name == "inputs" else name  # of an encoder of any kind
    if name not in _MAKERS:
        raise NotImplementedError(f"no tiny input is known for {name!r} of {type(model).__name__}")
    return {name: _MAKERS[name](model.config), **_beside(name)}


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

__all__ = ["source_inputs"]

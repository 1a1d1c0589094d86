"""Waveforms with zero mean and unit variance, for wav2vec 2.0, HuBERT, WavLM, SEW, UniSpeech, Moonshine, SpeechT5 and OmniASR.

In: `waveform` f32 [B, T], and `lengths` int64 [B] where the model masks. Out: `input_values` [B, T], and then `attention_mask`
int64 [B, T]; of OmniASR [B, 1, T] and `padding_mask`. Source: transformers' `Wav2Vec2FeatureExtractor`, which counts silence in
where it makes no mask, and `OmniASRFeatureExtractor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.waveforms import SoundFrontEnd

_VALUES, _MASK = "input_values", "attention_mask"
_EPSILON, _EPSILON_OF_LAYER_NORM = 1e-7, 1e-5  # added to the variance


class UnitVariance(nn.Module):
    """`waveform -> input_values`, or `(waveform, lengths) -> (input_values, attention_mask)`."""

    def __init__(self, *, normalizes: bool, padding_value: float, epsilon: float, has_channel: bool) -> None:
        """Take an extractor's settings."""
        super().__init__()
        self.normalizes = normalizes
        self.padding_value = padding_value
        self.epsilon = epsilon
        self.has_channel = has_channel

    def forward(
        self, waveform: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the values [B, T] or [B, 1, T], and the mask [B, T] where lengths int64 [B] are given."""
        # tract adds half a million f32 one after the other, which loses three digits; f64 has them to spare.
        exact = waveform.double()
        if lengths is None:
            return self._normalised(exact, lambda values: values.mean(1, keepdim=True))
        heard = torch.arange(waveform.shape[1], device=waveform.device) < lengths[:, None]
        values = waveform
        if self.normalizes:
            share = heard.double() / lengths[:, None].double()
            values = self._normalised(exact, lambda values: (values * share).sum(1, keepdim=True))
        values = values.masked_fill(~heard, self.padding_value)
        return values[:, None] if self.has_channel else values, heard.long()

    def _normalised(self, waveform: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return f32 [B, T] with zero mean and unit variance, of f64; `mean` is that of what is heard."""
        centred = waveform - mean(waveform)
        return (centred * torch.rsqrt(mean(centred.square()) + self.epsilon)).float()


@dataclass(frozen=True)
class UnitVarianceWaveform(SoundFrontEnd):
    """`UnitVariance` beside its extractor.

    Attributes:
        epsilon: added to the variance.
        has_channel: whether the values have an axis of one channel.
    """

    kind: ClassVar[str] = "waveform"

    epsilon: float = _EPSILON
    has_channel: bool = False

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (_VALUES,) if self.mask_name is None else (_VALUES, self.mask_name)

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        extractor = self.extractor
        return UnitVariance(
            normalizes=bool(extractor.do_normalize),
            padding_value=float(extractor.padding_value),
            epsilon=self.epsilon,
            has_channel=self.has_channel,
        )

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "normalized": bool(self.extractor.do_normalize)}

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        said = self.extractor(list(recordings), sampling_rate=self.sampling_rate, padding=True, return_tensors="pt")
        values = np.asarray(said[_VALUES], np.float32)
        return (values, np.asarray(said[self.mask_name], np.int64)) if self.mask_name is not None else (values,)


def unit_variance_waveform(extractor: Any, config: Any, options: GraphOptions) -> UnitVarianceWaveform | None:
    """Return the front end of a `Wav2Vec2FeatureExtractor` or one like it; None for one that changes nothing."""
    del config, options
    masks = bool(extractor.return_attention_mask)
    if not (masks or extractor.do_normalize) or extractor.padding_side != "right":
        return None
    return UnitVarianceWaveform(extractor, _MASK if masks else None)


def unit_variance_channel(extractor: Any, config: Any, options: GraphOptions) -> UnitVarianceWaveform | None:
    """Return the front end of an `OmniASRFeatureExtractor`."""
    del config, options
    if extractor.padding_side != "right" or extractor.feature_size != 1:
        return None
    return UnitVarianceWaveform(extractor, "padding_mask", _EPSILON_OF_LAYER_NORM, has_channel=True)


__all__ = ["UnitVariance", "UnitVarianceWaveform", "unit_variance_channel", "unit_variance_waveform"]

"""Waveforms with zero mean and unit variance, as wav2vec 2.0, HuBERT, WavLM, SEW, UniSpeech, Moonshine and SpeechT5 take them.

In: `waveform` f32 [B, T], and `lengths` int64 [B] where the model masks. Out: `input_values` [B, T], and then `attention_mask`
int64 [B, T]. Source: transformers' `Wav2Vec2FeatureExtractor`, which counts silence in where it makes no mask.
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
_EPSILON = 1e-7  # added to the variance


class UnitVariance(nn.Module):
    """`waveform -> input_values`, or `(waveform, lengths) -> (input_values, attention_mask)`."""

    def __init__(self, *, normalizes: bool, padding_value: float) -> None:
        """Take an extractor's settings."""
        super().__init__()
        self.normalizes = normalizes
        self.padding_value = padding_value

    def forward(
        self, waveform: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the values [B, T], and the mask [B, T] where lengths int64 [B] are given."""
        # tract adds half a million f32 one after the other, which loses three digits; f64 has them to spare.
        exact = waveform.double()
        if lengths is None:
            return _normalised(exact, lambda values: values.mean(1, keepdim=True))
        heard = torch.arange(waveform.shape[1], device=waveform.device) < lengths[:, None]
        values = waveform
        if self.normalizes:
            share = heard.double() / lengths[:, None].double()
            values = _normalised(exact, lambda values: (values * share).sum(1, keepdim=True))
        return values.masked_fill(~heard, self.padding_value), heard.long()


def _normalised(waveform: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return f32 [B, T] with zero mean and unit variance, of f64; `mean` is that of what is heard."""
    centred = waveform - mean(waveform)
    return (centred * torch.rsqrt(mean(centred.square()) + _EPSILON)).float()


@dataclass(frozen=True)
class UnitVarianceWaveform(SoundFrontEnd):
    """`UnitVariance` beside its extractor."""

    kind: ClassVar[str] = "waveform"

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (_VALUES,) if self.mask_name is None else (_VALUES, self.mask_name)

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        extractor = self.extractor
        return UnitVariance(normalizes=bool(extractor.do_normalize), padding_value=float(extractor.padding_value))

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "normalized": bool(self.extractor.do_normalize)}

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        said = self.extractor(list(recordings), sampling_rate=self.sampling_rate, padding=True, return_tensors="np")
        values = np.asarray(said[_VALUES], np.float32)
        return (values, said[_MASK].astype(np.int64)) if self.takes_lengths else (values,)


def unit_variance_waveform(extractor: Any, config: Any, options: GraphOptions) -> UnitVarianceWaveform | None:
    """Return the front end of a `Wav2Vec2FeatureExtractor` or one like it; None for one that changes nothing."""
    del config, options
    masks = bool(extractor.return_attention_mask)
    if not (masks or extractor.do_normalize) or extractor.padding_side != "right":
        return None
    return UnitVarianceWaveform(extractor, _MASK if masks else None)


__all__ = ["UnitVariance", "UnitVarianceWaveform", "unit_variance_waveform"]

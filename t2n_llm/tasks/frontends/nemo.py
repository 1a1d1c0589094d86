"""Log-mel features as NeMo makes them: Parakeet and Canary (normalised over the recording), Nemotron's streaming recognisers.

In: `waveform` f32 [B, T], and `lengths` int64 [B]. Out: `input_features` f32 [B, T / hop + 1, mels], `attention_mask` int64
[B, frames]. Source: transformers' `ParakeetFeatureExtractor` and `NemotronAsrStreamingFeatureExtractor`, which differ in that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.waveforms import SoundFrontEnd

_FEATURES, _MASK = "input_features", "attention_mask"
_GUARD = 2.0**-24  # added to the energy in a band
_EPSILON = 1e-5  # added to the deviation


class NemoLogMel(nn.Module):
    """`(waveform, lengths) -> (input_features, attention_mask)`."""

    window: torch.Tensor
    mel_filters: torch.Tensor

    def __init__(self, extractor: Any, *, normalizes: bool) -> None:
        """Take an extractor's sizes and filters."""
        super().__init__()
        self.n_fft, self.hop = int(extractor.n_fft), int(extractor.hop_length)
        self.emphasis = float(extractor.preemphasis or 0.0)
        self.normalizes = normalizes
        dtype = getattr(torch, getattr(extractor, "mel_filters_dtype", "float32"))  # to which checkpoints rounded them
        length = int(extractor.win_length)
        before = (self.n_fft - length) // 2
        window = torch.hann_window(length, periodic=False).to(dtype).float()
        self.register_buffer("window", F.pad(window, (before, self.n_fft - length - before)))
        self.register_buffer("mel_filters", extractor.mel_filters.to(dtype).float())

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [B, frames, mels] and int64 [B, frames]."""
        emphasised = torch.cat((waveform[:, :1], waveform[:, 1:] - self.emphasis * waveform[:, :-1]), dim=1)
        heard = torch.arange(waveform.shape[1], device=waveform.device) < lengths[:, None]
        silence = waveform.new_zeros(waveform.shape[0], self.n_fft // 2)
        surrounded = torch.cat((silence, emphasised.masked_fill(~heard, 0.0), silence), dim=1)
        spectrum = torch.stft(
            surrounded, self.n_fft, self.hop, window=self.window, center=False, onesided=True, return_complex=True
        )
        power = torch.view_as_real(spectrum).square().sum(-1)
        features = (self.mel_filters @ power + _GUARD).log().transpose(1, 2)
        frames = torch.div(lengths, self.hop, rounding_mode="floor")[:, None]
        mask = torch.arange(features.shape[1], device=waveform.device) < frames
        if self.normalizes:
            features = _normalised(features, mask[..., None].double(), frames[..., None].double())
        return features.masked_fill(~mask[..., None], 0.0), mask.long()


def _normalised(features: torch.Tensor, mask: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Return features with zero mean and unit deviation in each band; the sums over all frames are f64."""
    exact = features.double()
    mean = (exact * mask).sum(1, keepdim=True) / frames
    variance = ((exact - mean).square() * mask).sum(1, keepdim=True) / (frames - 1)
    return ((exact - mean) / (variance.sqrt() + _EPSILON)).float()


@dataclass(frozen=True)
class NemoFeatures(SoundFrontEnd):
    """`NemoLogMel` beside its extractor."""

    kind: ClassVar[str] = "log-mel-of-utterance"

    normalizes: bool = True

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return _FEATURES, _MASK

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return NemoLogMel(self.extractor, normalizes=self.normalizes)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "num_mel_bins": int(self.extractor.feature_size), "normalized": self.normalizes}

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        said = self.extractor(list(recordings), sampling_rate=self.sampling_rate, return_tensors="pt")
        return said[_FEATURES].float().numpy(), said[_MASK].long().numpy()


def utterance_log_mel(extractor: Any, config: Any, options: GraphOptions) -> NemoFeatures:
    """Return the front end of a `ParakeetFeatureExtractor`."""
    del config, options
    return NemoFeatures(extractor, _MASK)


def streaming_log_mel(extractor: Any, config: Any, options: GraphOptions) -> NemoFeatures:
    """Return the front end of a `NemotronAsrStreamingFeatureExtractor`, for whole recordings."""
    del config, options
    return NemoFeatures(extractor, _MASK, normalizes=False)


__all__ = ["NemoFeatures", "NemoLogMel", "streaming_log_mel", "utterance_log_mel"]

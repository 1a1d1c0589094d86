"""Log-mel features as Whisper takes them, and every model that took over its extractor (Qwen2-Audio, Voxtral, Audio Flamingo).

In: `waveform` f32 [B, T], cut or filled with silence to the extractor's length (30 s). Out: `input_features`
[B, mels, frames]; where a model masks, which of the frames are before the end of the recording, int64 [B, frames].
Source: transformers' `WhisperFeatureExtractor`; Radford et al. 2022, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.waveforms import SoundFrontEnd

_FEATURES = "input_features"
_FLOOR = 1e-10  # of the energy in a band
_RANGE = 8.0  # orders of magnitude below the loudest band that are heard
_FRAME_MASKS: Mapping[str, str] = {
    "qwen2_audio": "feature_attention_mask",
    "qwen2_5_omni": "feature_attention_mask",
    "qwen3_omni_moe": "feature_attention_mask",
    "audioflamingo3": "input_features_mask",
    "glmasr": "input_features_mask",
}
"""What the models that hide the silence after a recording call the mask."""


class LogMel(nn.Module):
    """`waveform -> input_features`, or `(waveform, lengths) -> (input_features, mask)`."""

    window: torch.Tensor
    mel_filters: torch.Tensor

    def __init__(self, extractor: Any) -> None:
        """Take sizes, filters and window of a `WhisperFeatureExtractor`."""
        super().__init__()
        self.samples = int(extractor.n_samples)
        self.frames = int(extractor.nb_max_frames)
        self.n_fft, self.hop = int(extractor.n_fft), int(extractor.hop_length)
        self.register_buffer("window", torch.hann_window(self.n_fft, dtype=torch.float64).float())
        self.register_buffer("mel_filters", torch.from_numpy(np.ascontiguousarray(extractor.mel_filters.T)).float())

    def forward(
        self, waveform: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return [B, mels, frames], and the mask [B, frames] where lengths int64 [B] are given."""
        silence = waveform.new_zeros(waveform.shape[0], self.samples)
        heard = torch.cat((waveform, silence), dim=1)[:, : self.samples]
        energy = self.mel_filters @ self._power(heard)
        # The logarithm of f64 that log10 stands for is not needed: 23 decades of f32 have 1e-6 of room.
        logarithm = energy.clamp(min=_FLOOR).log() * math.log10(math.e)
        loudest = logarithm.amax((1, 2), keepdim=True)
        features = torch.maximum(logarithm, loudest - _RANGE) * 0.25 + 1.0
        if lengths is None:
            return features
        starts = torch.arange(self.frames, device=waveform.device) * self.hop
        return features, (starts < lengths[:, None]).long()

    def _power(self, heard: torch.Tensor) -> torch.Tensor:
        """Return the power [B, bins, frames] of frames around every hop-th sample, the waveform mirrored at its ends."""
        half = self.n_fft // 2
        # The last frame, around the sample after the end, is left out: no more samples than the others read.
        end = max(0, (self.frames - 1) * self.hop + half - self.samples)
        before, after = heard[:, 1 : half + 1].flip(1), heard[:, -1 - end : -1].flip(1)
        mirrored = torch.cat((before, heard, after), dim=1)[:, : (self.frames - 1) * self.hop + self.n_fft]
        spectrum = torch.stft(
            mirrored, self.n_fft, self.hop, window=self.window, center=False, onesided=True, return_complex=True
        )
        return torch.view_as_real(spectrum).square().sum(-1)


@dataclass(frozen=True)
class WhisperLogMel(SoundFrontEnd):
    """`LogMel` beside its extractor."""

    kind: ClassVar[str] = "log-mel"

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (_FEATURES,) if self.mask_name is None else (_FEATURES, self.mask_name)

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return LogMel(self.extractor)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        samples = int(self.extractor.n_samples)
        return {
            **super().described(),
            "samples": samples,
            "seconds": samples / self.sampling_rate,
            "longer_input": "cut after these samples: give longer recordings piece by piece",
            "features": [int(self.extractor.feature_size), int(self.extractor.nb_max_frames)],
        }

    def seconds_to_check(self) -> Sequence[float]:
        """See `SoundFrontEnd`: shorter and longer than a segment."""
        whole = self.extractor.n_samples / self.sampling_rate
        return 0.11 * whole, 1.04 * whole

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        said = self.extractor(
            list(recordings),
            sampling_rate=self.sampling_rate,
            padding="max_length",
            return_attention_mask=self.takes_lengths,
            return_tensors="np",
        )
        features = np.asarray(said[_FEATURES], np.float32)
        return (features, said["attention_mask"].astype(np.int64)) if self.takes_lengths else (features,)


def whisper_log_mel(extractor: Any, config: Any, options: GraphOptions) -> WhisperLogMel | None:
    """Return the front end of a `WhisperFeatureExtractor`; None for one that adds noise."""
    del options
    if getattr(extractor, "dither", 0.0):
        return None
    return WhisperLogMel(extractor, _FRAME_MASKS.get(config.model_type))


__all__ = ["LogMel", "WhisperLogMel", "whisper_log_mel"]

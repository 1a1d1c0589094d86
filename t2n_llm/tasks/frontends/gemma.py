"""Log-mel features of magnitudes, as Gemma 3n and Gemma 4 take them.

In: `waveform` f32 [B, T], and `lengths` int64 [B]. Out: `input_features` f32 [B, frames, mels], `input_features_mask` int64
[B, frames]. Source: transformers' `Gemma3nAudioFeatureExtractor` and `Gemma4AudioFeatureExtractor`.
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

_FEATURES, _MASK = "input_features", "input_features_mask"
_MULTIPLE = 128  # to which the extractors pad recordings, in samples


class GemmaLogMel(nn.Module):
    """`(waveform, lengths) -> (input_features, input_features_mask)`."""

    window: torch.Tensor
    mel_filters: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, extractor: Any, *, starts_before: bool) -> None:
        """Take an extractor's sizes and filters.

        Args:
            extractor: of transformers.
            starts_before: the first frame begins half a frame before the recording, a frame counts when all of it is before
                the end, others are 0, and the floor is added (Gemma 4). Otherwise a frame counts when it starts before the
                end, and the floor is the least value (Gemma 3n).
        """
        super().__init__()
        self.frame, self.hop, self.n_fft = extractor.frame_length, extractor.hop_length, extractor.fft_length
        self.starts_before = starts_before
        self.emphasis, self.factor = float(extractor.preemphasis), float(extractor.input_scale_factor)
        self.floor = float(extractor.mel_floor)
        window = torch.from_numpy(np.asarray(extractor.window, np.float32))
        self.register_buffer("window", F.pad(window, (0, self.n_fft - self.frame)))
        self.register_buffer("mel_filters", torch.from_numpy(np.asarray(extractor.mel_filters, np.float32)))
        for name, values, neutral in (
            ("mean", extractor.per_bin_mean, 0.0),
            ("deviation", extractor.per_bin_stddev, 1.0),
        ):
            self.register_buffer(name, torch.from_numpy(np.asarray(neutral if values is None else values, np.float32)))

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [B, frames, mels] and int64 [B, frames]."""
        past_end = torch.arange(waveform.shape[1], device=waveform.device) >= lengths[:, None]
        silence = self.frame // 2 if self.starts_before else 0
        filled = (waveform.shape[1] + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE - waveform.shape[1]
        around = (silence, filled + self.n_fft - self.frame - 1)
        surrounded = F.pad(self.factor * waveform.masked_fill(past_end, 0.0), around)
        # The window is 0 at the first sample of a frame: the extractor has another emphasis there.
        before = torch.cat((surrounded[:, :1], surrounded[:, :-1]), dim=1)
        emphasized = surrounded - self.emphasis * before
        spectrum = torch.stft(
            emphasized, self.n_fft, self.hop, window=self.window, center=False, onesided=True, return_complex=True
        )
        magnitudes = torch.view_as_real(spectrum).square().sum(-1).sqrt().transpose(1, 2)
        mels = magnitudes @ self.mel_filters
        features = (mels + self.floor if self.starts_before else mels.clamp(min=self.floor)).log()
        last = self.frame - silence if self.starts_before else 0
        mask = torch.arange(features.shape[1], device=waveform.device) * self.hop + last < lengths[:, None]
        features = (features - self.mean) / self.deviation
        return features.masked_fill(~mask[..., None], 0.0) if self.starts_before else features, mask.long()


@dataclass(frozen=True)
class GemmaFeatures(SoundFrontEnd):
    """`GemmaLogMel` beside its extractor."""

    kind: ClassVar[str] = "log-mel-of-magnitudes"

    starts_before: bool = False

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return _FEATURES, _MASK

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return GemmaLogMel(self.extractor, starts_before=self.starts_before)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "num_mel_bins": int(self.extractor.feature_size)}

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        made = self.extractor(list(recordings), return_tensors="np")
        return np.asarray(made[_FEATURES], np.float32), np.asarray(made[_MASK]).astype(np.int64)


def gemma_3n_log_mel(extractor: Any, config: Any, options: GraphOptions) -> GemmaFeatures | None:
    """Return the front end of a `Gemma3nAudioFeatureExtractor`; None for one that adds noise, or emphasizes in another way."""
    del config, options
    return GemmaFeatures(extractor, _MASK) if _is_known(extractor) else None


def gemma_4_log_mel(extractor: Any, config: Any, options: GraphOptions) -> GemmaFeatures | None:
    """Return the front end of a `Gemma4AudioFeatureExtractor`; None for one that adds noise, or emphasizes in another way."""
    del config, options
    return GemmaFeatures(extractor, _MASK, starts_before=True) if _is_known(extractor) else None


def _is_known(extractor: Any) -> bool:
    return not extractor.dither and (not extractor.preemphasis or extractor.preemphasis_htk_flavor)


__all__ = ["GemmaFeatures", "GemmaLogMel", "gemma_3n_log_mel", "gemma_4_log_mel"]

"""Kaldi's filter banks: as the Audio Spectrogram Transformer, Speech2Text, SeamlessM4T and wav2vec2-BERT take them.

In: `waveform` f32 [B, T], and `lengths` int64 [B]. Out: logarithms of energies [B, frames, mels], normalised as each family does.
What Kaldi does to a frame (mean removed, pre-emphasis, window, Fourier transform) is linear: one matrix, which a strided
convolution multiplies with every frame. Source: transformers' `spectrogram` and the extractors named below.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.waveforms import SoundFrontEnd

_FRAME, _HOP, _FFT = 400, 160, 512  # samples, whatever the rate: what the extractors have
_EMPHASIS = 0.97
_FLOOR = 1.192092955078125e-07
_FULL_SCALE = 2.0**15  # Kaldi reads 16-bit numbers; transformers leaves that out for the Audio Spectrogram Transformer
_EPSILON = 1e-7

_FEATURES, _VALUES, _MASK = "input_features", "input_values", "attention_mask"


def frame_matrix(window: np.ndarray, full_scale: float) -> torch.Tensor:
    """Return f32 [2 * bins, 1, samples]: real, then imaginary parts of the spectrum of a frame."""
    centred = np.eye(_FRAME) - 1.0 / _FRAME
    emphasised = np.eye(_FRAME) - _EMPHASIS * np.eye(_FRAME, k=-1)
    emphasised[0, 0] = 1.0 - _EMPHASIS
    angle = 2 * np.pi * (np.outer(np.arange(_FFT // 2 + 1), np.arange(_FRAME)) % _FFT) / _FFT
    spectrum = np.concatenate([np.cos(angle), -np.sin(angle)]) * window
    return torch.from_numpy(full_scale * (spectrum @ emphasised @ centred)).float()[:, None]


class KaldiBank(nn.Module):
    """`(waveform, lengths) -> (logarithms [B, frames, mels], which frames are heard [B, frames])`."""

    frame_matrix: torch.Tensor
    mel_filters: torch.Tensor

    def __init__(self, extractor: Any, window_name: str, full_scale: float, frames: int | None = None) -> None:
        """Take an extractor's filters.

        Args:
            extractor: of transformers.
            window_name: of its window.
            full_scale: what the largest sample stands for.
            frames: how many there always are; None takes those of the waveform.
        """
        from transformers.audio_utils import mel_filter_bank, window_function

        super().__init__()
        rate = int(extractor.sampling_rate)
        filters = mel_filter_bank(
            num_frequency_bins=_FFT // 2 + 1,
            num_mel_filters=int(extractor.num_mel_bins),
            min_frequency=20,
            max_frequency=rate // 2,
            sampling_rate=rate,
            norm=None,
            mel_scale="kaldi",
            triangularize_in_mel_space=True,
        )
        window = window_function(_FRAME, window_name, periodic=False)
        self.frames = frames
        self.register_buffer("frame_matrix", frame_matrix(window, full_scale))
        self.register_buffer("mel_filters", torch.from_numpy(np.ascontiguousarray(filters.T)).float())

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [B, frames, mels], and bool [B, frames]: a frame is heard where it ends before the recording does."""
        if self.frames is not None:
            samples = (self.frames - 1) * _HOP + _FRAME
            waveform = torch.cat((waveform, waveform.new_zeros(waveform.shape[0], samples)), dim=1)[:, :samples]
        parts = F.conv1d(waveform[:, None], self.frame_matrix, stride=_HOP).square()
        power = parts[:, : _FFT // 2 + 1] + parts[:, _FFT // 2 + 1 :]
        logarithms = (self.mel_filters @ power).clamp(min=_FLOOR).log().transpose(1, 2)
        ends = torch.arange(logarithms.shape[1], device=waveform.device) * _HOP + _FRAME
        return logarithms, ends <= lengths[:, None]


class FixedLength(nn.Module):
    """As the Audio Spectrogram Transformer: so many frames, zeros after the recording, mean and deviation of all recordings."""

    def __init__(self, extractor: Any) -> None:
        """Take an `ASTFeatureExtractor`."""
        super().__init__()
        self.bank = KaldiBank(extractor, "hann", 1.0, int(extractor.max_length))
        normalizes = bool(extractor.do_normalize)
        self.mean = float(extractor.mean) if normalizes else 0.0
        self.scale = 0.5 / float(extractor.std) if normalizes else 1.0

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return f32 [B, frames, mels]."""
        logarithms, heard = self.bank(waveform, lengths)
        return (logarithms.masked_fill(~heard[..., None], 0.0) - self.mean) * self.scale


class PerUtterance(nn.Module):
    """As Speech2Text: mean and deviation of each band over the recording; then the mask."""

    def __init__(self, extractor: Any) -> None:
        """Take a `Speech2TextFeatureExtractor`."""
        super().__init__()
        self.bank = KaldiBank(extractor, "povey", _FULL_SCALE)
        normalizes = bool(extractor.do_ceptral_normalize)
        self.centres = normalizes and bool(extractor.normalize_means)
        self.scales = normalizes and bool(extractor.normalize_vars)
        self.padding_value = float(extractor.padding_value)

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [B, frames, mels] and int64 [B, frames]."""
        logarithms, heard = self.bank(waveform, lengths)
        mean, variance = _moments(logarithms, heard, correction=0)
        values = logarithms - mean if self.centres else logarithms
        values = values * torch.rsqrt(variance) if self.scales else values
        return values.masked_fill(~heard[..., None], self.padding_value), heard.long()


class JoinedFrames(nn.Module):
    """As SeamlessM4T: mean and deviation of each band over the recording, neighbouring frames side by side; then the mask."""

    def __init__(self, extractor: Any) -> None:
        """Take a `SeamlessM4TFeatureExtractor`."""
        super().__init__()
        self.bank = KaldiBank(extractor, "povey", _FULL_SCALE)
        self.padding_value = float(extractor.padding_value)

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [B, frames / 2, mels * 2] and int64 [B, frames / 2], rounded up; the mask is the second frame's."""
        logarithms, heard = self.bank(waveform, lengths)
        mean, variance = _moments(logarithms, heard, correction=1)
        values = (logarithms - mean) * torch.rsqrt(variance + _EPSILON)
        values = values.masked_fill(~heard[..., None], self.padding_value)
        filled = torch.cat((values, torch.full_like(values[:, :1], self.padding_value)), dim=1)
        joined = torch.cat(
            (values[:, ::2], filled[:, 1::2]), dim=2
        )  # the last one's neighbour may be the one filled in
        ends = torch.arange(joined.shape[1], device=waveform.device) * (2 * _HOP) + _HOP + _FRAME
        return joined, (ends <= lengths[:, None]).long()


def _moments(values: torch.Tensor, heard: torch.Tensor, correction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance f32 [B, 1, mels] over the frames that are heard."""
    # In f64: thousands of frames are added one after the other.
    weights = heard[..., None].double()
    exact, count = values.double(), weights.sum(1, keepdim=True)
    mean = (exact * weights).sum(1, keepdim=True) / count
    variance = ((exact - mean).square() * weights).sum(1, keepdim=True) / (count - correction)
    return mean.float(), variance.float()


@dataclass(frozen=True)
class FilterBank(SoundFrontEnd):
    """What the three have in common: filters, and a length for each recording."""

    kind: ClassVar[str] = "filter-bank"

    @property
    def takes_lengths(self) -> bool:
        """See `SoundFrontEnd`: always, for frames after the end are not like frames of silence."""
        return True

    @property
    @abstractmethod
    def features_name(self) -> str:
        """What the model calls its features."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (self.features_name,) if self.mask_name is None else (self.features_name, self.mask_name)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "num_mel_bins": int(self.extractor.num_mel_bins), "min_samples": _FRAME}

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        padded = {} if self.mask_name is None else {"padding": True, "return_attention_mask": True}
        said = self.extractor(list(recordings), sampling_rate=self.sampling_rate, return_tensors="np", **padded)
        features = np.asarray(said[self.features_name], np.float32)
        return (features,) if self.mask_name is None else (features, said[self.mask_name].astype(np.int64))


@dataclass(frozen=True)
class SpectrogramTransformerBank(FilterBank):
    """`FixedLength` beside its extractor."""

    features_name: ClassVar[str] = _VALUES

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return FixedLength(self.extractor)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        extractor = self.extractor
        return {
            **super().described(),
            "frames": int(extractor.max_length),
            "mean": extractor.mean,
            "std": extractor.std,
        }

    def seconds_to_check(self) -> Sequence[float]:
        """See `SoundFrontEnd`: shorter and longer than the frames that there are."""
        whole = self.extractor.max_length * _HOP / self.sampling_rate
        return 0.4 * whole, 1.1 * whole


@dataclass(frozen=True)
class UtteranceBank(FilterBank):
    """`PerUtterance` beside its extractor."""

    features_name: ClassVar[str] = _FEATURES

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return PerUtterance(self.extractor)


@dataclass(frozen=True)
class JoinedBank(FilterBank):
    """`JoinedFrames` beside its extractor."""

    features_name: ClassVar[str] = _FEATURES

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return JoinedFrames(self.extractor)


def spectrogram_transformer_bank(extractor: Any, config: Any, options: GraphOptions) -> SpectrogramTransformerBank:
    """Return the front end of an `ASTFeatureExtractor`."""
    del config, options
    return SpectrogramTransformerBank(extractor)


def utterance_bank(extractor: Any, config: Any, options: GraphOptions) -> UtteranceBank | None:
    """Return the front end of a `Speech2TextFeatureExtractor`; None for one that adds noise."""
    del config, options
    return UtteranceBank(extractor, _MASK) if not getattr(extractor, "dither", 0.0) else None


def joined_bank(extractor: Any, config: Any, options: GraphOptions) -> JoinedBank | None:
    """Return the front end of a `SeamlessM4TFeatureExtractor`; None where it joins another number of frames than it fills up to."""
    del config, options
    return JoinedBank(extractor, _MASK) if extractor.stride == 2 else None


__all__ = ["KaldiBank", "frame_matrix", "joined_bank", "spectrogram_transformer_bank", "utterance_bank"]

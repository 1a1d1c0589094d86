"""Decibels in mel bands, as CLAP takes them: ten seconds, shorter recordings repeated.

In: `waveform` f32 [B, T], and `lengths` int64 [B]. Out: `input_features` f32 [B, views, frames, mels]. A model that fuses views
takes four, which are alike here: those of recordings of more than ten seconds transformers draws at random; longer ones are cut.
Source: transformers' `ClapFeatureExtractor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.waveforms import SoundFrontEnd

_FEATURES = "input_features"
_FLOOR = 1e-10  # of the energy in a band
_FUSED_VIEWS = 4


class Decibels(nn.Module):
    """`(waveform, lengths) -> input_features`."""

    window: torch.Tensor
    mel_filters: torch.Tensor

    def __init__(self, extractor: Any) -> None:
        """Take an extractor's sizes, filters and ways to fill up."""
        super().__init__()
        fuses = extractor.truncation == "fusion"
        filters = extractor.mel_filters if fuses else extractor.mel_filters_slaney
        self.views = _FUSED_VIEWS if fuses else 1
        self.samples = int(extractor.nb_max_samples)
        self.repeats, self.whole_repeats = "repeat" in extractor.padding, extractor.padding == "repeatpad"
        self.n_fft, self.hop = int(extractor.fft_window_size), int(extractor.hop_length)
        self.register_buffer("window", torch.hann_window(self.n_fft, dtype=torch.float64).float())
        self.register_buffer("mel_filters", torch.from_numpy(np.ascontiguousarray(filters.T)).float())

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return f32 [B, views, frames, mels]."""
        heard, half = self._filled(waveform, lengths), self.n_fft // 2
        mirrored = torch.cat((heard[:, 1 : half + 1].flip(1), heard, heard[:, -half - 1 : -1].flip(1)), dim=1)
        spectrum = torch.stft(
            mirrored, self.n_fft, self.hop, window=self.window, center=False, onesided=True, return_complex=True
        )
        power = torch.view_as_real(spectrum).square().sum(-1)
        decibels = (self.mel_filters @ power).clamp(min=_FLOOR).log() * (10.0 * math.log10(math.e))
        return decibels.transpose(1, 2)[:, None].expand(-1, self.views, -1, -1)

    def _filled(self, waveform: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return as many samples as there are always, [B, samples]."""
        lengths = lengths.clamp(max=self.samples)[:, None]
        places = torch.arange(self.samples, device=waveform.device)[None]
        times = torch.div(places, lengths, rounding_mode="floor")  # how often the recording was heard before
        end = torch.div(self.samples, lengths, rounding_mode="floor") if self.whole_repeats else self.samples
        known = times < (end if self.repeats else 1)
        picked = torch.gather(waveform, 1, places - times * lengths)
        return picked.masked_fill(~known, 0.0)


@dataclass(frozen=True)
class ClapDecibels(SoundFrontEnd):
    """`Decibels` beside its extractor."""

    kind: ClassVar[str] = "decibels"

    @property
    def takes_lengths(self) -> bool:
        """See `SoundFrontEnd`: what is repeated must be known."""
        return True

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return (_FEATURES,)

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return Decibels(self.extractor)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        samples = int(self.extractor.nb_max_samples)
        return {
            **super().described(),
            "samples": samples,
            "seconds": samples / self.sampling_rate,
            "longer_input": "cut",
        }

    def seconds_to_check(self) -> Sequence[float]:
        """See `SoundFrontEnd`: nothing longer, of which the extractor takes a part at random."""
        whole = self.extractor.nb_max_samples / self.sampling_rate
        return 0.3 * whole, 0.9 * whole

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        said = self.extractor(list(recordings), sampling_rate=self.sampling_rate, return_tensors="np")
        return (np.asarray(said[_FEATURES], np.float32),)


def clap_decibels(extractor: Any, config: Any, options: GraphOptions) -> ClapDecibels | None:
    """Return the front end of a `ClapFeatureExtractor`; None for a way to fill up or to cut that is unknown here."""
    del config, options
    known = extractor.truncation in ("fusion", "rand_trunc") and extractor.padding in ("repeatpad", "repeat", "pad")
    return ClapDecibels(extractor) if known else None


__all__ = ["ClapDecibels", "Decibels", "clap_decibels"]

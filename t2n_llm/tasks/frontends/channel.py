"""Waveforms as one channel, with silence up to a whole number of hops: EnCodec, DAC and models that hear through their codes.

In: `waveform` f32 [B, T], and `lengths` int64 [B]. Out: `input_values` f32 [B, 1, T'], `padding_mask` int64 [B, T'].
Source: transformers' `EncodecFeatureExtractor` and `DacFeatureExtractor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from t2n_llm.graph.options import GraphOptions
from t2n_llm.tasks.frontends.waveforms import SoundFrontEnd

_VALUES, _MASK = "input_values", "padding_mask"


class Channel(nn.Module):
    """`(waveform, lengths) -> (input_values, padding_mask)`."""

    def __init__(self, hop: int) -> None:
        """Take what the length is a multiple of."""
        super().__init__()
        self.hop = hop

    def forward(self, waveform: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f32 [B, 1, T'] and int64 [B, T']."""
        samples = waveform.shape[1]
        places = torch.arange((samples + self.hop - 1) // self.hop * self.hop, device=waveform.device)
        heard = places < lengths[:, None]
        values = waveform.index_select(1, places.clamp(max=samples - 1)) if self.hop > 1 else waveform
        return values.masked_fill(~heard, 0.0)[:, None], heard.long()


@dataclass(frozen=True)
class ChannelWaveform(SoundFrontEnd):
    """`Channel` beside its extractor."""

    kind: ClassVar[str] = "channel"

    hop: int = 1

    @property
    def output_names(self) -> tuple[str, ...]:
        """See `FrontEnd`."""
        return _VALUES, _MASK

    def module(self) -> nn.Module:
        """See `FrontEnd`."""
        return Channel(self.hop)

    def described(self) -> dict[str, Any]:
        """See `FrontEnd`."""
        return {**super().described(), "multiple_of": self.hop}

    def reference(self, recordings: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """See `SoundFrontEnd`."""
        said = self.extractor(list(recordings), sampling_rate=self.sampling_rate, padding=True, return_tensors="np")
        return np.asarray(said[_VALUES], np.float32), said[_MASK].astype(np.int64)


def channel(extractor: Any, config: Any, options: GraphOptions) -> ChannelWaveform | None:
    """Return the front end of an `EncodecFeatureExtractor`; None for two channels, or one that cuts recordings into pieces."""
    del config, options
    plain = extractor.feature_size == 1 and getattr(extractor, "chunk_length_s", None) is None
    return ChannelWaveform(extractor, _MASK) if plain and extractor.padding_side == "right" else None


def channel_of_hops(extractor: Any, config: Any, options: GraphOptions) -> ChannelWaveform | None:
    """Return the front end of a `DacFeatureExtractor`; None for two channels."""
    del config, options
    plain = extractor.feature_size == 1 and extractor.padding_side == "right"
    return ChannelWaveform(extractor, _MASK, int(extractor.hop_length)) if plain else None


__all__ = ["Channel", "ChannelWaveform", "channel", "channel_of_hops"]

"""A mel-spectrogram front end, as speech recognisers have in front: waveform of any length in, log-mel frames out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine_check import check

SAMPLE_RATE, N_FFT, HOP, MELS = 16_000, 400, 160, 80


def mel_filters() -> torch.Tensor:
    """Triangles that are equally spaced on the mel scale, [mels, bins]."""
    top = 2595.0 * torch.log10(torch.tensor(1.0 + SAMPLE_RATE / 2 / 700.0))
    edges = 700.0 * (10.0 ** (torch.linspace(0.0, float(top), MELS + 2) / 2595.0) - 1.0)
    bins = torch.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    slopes = (bins[None, :] - edges[:, None]) / (edges[1:] - edges[:-1]).mean()
    return torch.clamp(torch.minimum(slopes[:-2], -slopes[2:]), min=0) * 0.5


class WhisperFrontEnd(nn.Module):
    """Log-mel spectrogram with Whisper's clipping and scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.register_buffer("filters", mel_filters())

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        stft = torch.stft(waveform, N_FFT, HOP, window=self.window, return_complex=True)
        power = stft[..., :-1].abs() ** 2
        log_mel = torch.clamp(self.filters @ power, min=1e-10).log10()
        log_mel = torch.maximum(log_mel, log_mel.amax(dim=(1, 2), keepdim=True) - 8.0)
        return (log_mel + 4.0) / 4.0


class KaldiFrontEnd(nn.Module):
    """Pre-emphasis, Hamming window made on the fly, natural logarithm, mean of each utterance removed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", mel_filters())

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        emphasised = torch.cat([waveform[:, :1], waveform[:, 1:] - 0.97 * waveform[:, :-1]], dim=1)
        window = torch.hamming_window(N_FFT, periodic=False)
        stft = torch.stft(emphasised, N_FFT, HOP, window=window, center=False, return_complex=True)
        features = torch.log(self.filters @ torch.view_as_real(stft).square().sum(-1) + 1e-6).mT
        return features - features.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("front_end", [WhisperFrontEnd, KaldiFrontEnd])
def test_log_mel_frames_at_three_lengths(front_end: type[nn.Module]) -> None:
    torch.manual_seed(0)
    lengths = (4000, 2400, 7133)
    waves = [(torch.randn(2, length) * 0.1 + torch.sin(torch.arange(length) * 0.05),) for length in lengths]
    check(front_end(), *waves, dynamic_axes={"input_0": {1: "T"}}, atol=1e-4, rtol=0)

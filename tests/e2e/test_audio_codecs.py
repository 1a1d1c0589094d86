"""Audio codecs of transformers, and a residual quantizer with strides, at lengths and batches other than the example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DacConfig, DacModel, EncodecConfig, EncodecModel, MimiConfig, MimiModel

from tests.engine_check import check

AXES = {"input_0": {0: "B", 2: "T"}}
CODES = 16


class Part(nn.Module):
    """One method of a codec as a module."""

    def __init__(self, model: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.model, x)


def _encodec() -> nn.Module:
    config = EncodecConfig(
        num_filters=4,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=CODES,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[48.0],
    )
    return EncodecModel(config).eval()


def _mimi() -> nn.Module:
    config = MimiConfig(
        num_filters=4,
        hidden_size=16,
        codebook_dim=8,
        codebook_size=CODES,
        upsampling_ratios=[4, 2],
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_quantizers=4,
        vector_quantization_hidden_dimension=8,
        upsample_groups=16,
        frame_rate=1500,
    )
    return MimiModel(config).eval()


def _dac() -> nn.Module:
    config = DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        upsampling_ratios=[4, 2],
        n_codebooks=3,
        codebook_size=CODES,
        codebook_dim=4,
    )
    return DacModel(config).eval()


CODECS = {"encodec": _encodec, "mimi": _mimi, "dac": _dac}
DECODED = {
    "encodec": (4, lambda model, codes: model.decode(codes[None], [None]).audio_values),
    "mimi": (4, lambda model, codes: model.decode(codes).audio_values),
    "dac": (3, lambda model, codes: model.decode(audio_codes=codes).audio_values),
}


def _encoded(model: Any, wave: torch.Tensor) -> torch.Tensor:
    codes: torch.Tensor = model.encode(wave).audio_codes
    return codes


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CODECS)
def test_waves_become_codes(name: str) -> None:
    torch.manual_seed(0)
    example, *others = (
        (torch.randn(batch, 1, size) * 0.1,) for batch, size in ((2, 800), (1, 641), (3, 1000), (1, 333))
    )
    check(Part(CODECS[name](), _encoded), example, *others, dynamic_axes=AXES)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODED)
def test_codes_become_waves(name: str) -> None:
    torch.manual_seed(0)
    count, call = DECODED[name]
    example, *others = ((torch.randint(0, CODES, (batch, count, size)),) for batch, size in ((1, 50), (2, 33), (1, 7)))
    check(Part(CODECS[name](), call), example, *others, dynamic_axes=AXES, atol=1e-4)


class ResidualQuantizer(nn.Module):
    """Codes of what earlier codebooks left, each at a coarser or finer stride, as in SNAC."""

    def __init__(self, strides: tuple[int, ...] = (4, 2, 1)) -> None:
        super().__init__()
        self.strides = strides
        self.reading = nn.ModuleList(nn.Conv1d(16, 4, 1) for _ in strides)
        self.writing = nn.ModuleList(nn.Conv1d(4, 16, 1) for _ in strides)
        self.codebooks = nn.ParameterList(torch.randn(32, 4) for _ in strides)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the codes stand for [B, 16, T], and the codes of each stride."""
        rest, codes = x, []
        for stride, reading, writing, codebook in zip(
            self.strides, self.reading, self.writing, self.codebooks, strict=True
        ):
            rows = reading(F.avg_pool1d(rest, stride, stride)).transpose(1, 2).reshape(-1, 4)
            places = (F.normalize(rows) @ F.normalize(codebook).t()).argmax(1).view(x.shape[0], -1)
            found = writing(F.embedding(places, codebook).transpose(1, 2)).repeat_interleave(stride, dim=-1)
            rest = rest - found
            codes.append(places)
        return x - rest, *codes


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*multiple_of=4")
def test_a_residual_quantizer_of_several_strides() -> None:
    torch.manual_seed(0)
    example, *others = ((torch.randn(batch, 16, size),) for batch, size in ((2, 16), (1, 8), (3, 40)))
    check(ResidualQuantizer(), example, *others, dynamic_axes=AXES)

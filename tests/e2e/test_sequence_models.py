"""Whole sequence models with random weights, dynamic batch and length, right at three sizes in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine_check import check

transformers = pytest.importorskip("transformers")

SIZES = ((2, 7), (1, 12), (3, 5))
B, T = "B", "T"


def ids(batch: int, length: int, vocabulary: int = 30) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def padding(batch: int, length: int) -> torch.Tensor:
    """int64 [B, T]: each row a little shorter than the last."""
    return (torch.arange(length)[None] < length - torch.arange(batch)[:, None]).long()


class Encoder(nn.Module):
    """input_ids, attention_mask -> last hidden state (padding zeroed)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        result = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return result * attention_mask[..., None]


_BERT = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ENCODERS: dict[str, Callable[[str], nn.Module]] = {
    "bert": lambda attention: transformers.BertModel(
        transformers.BertConfig(**_BERT, max_position_embeddings=32, attn_implementation=attention)
    ),
    "distilbert": lambda attention: transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=32, attn_implementation=attention
        )
    ),
    "roberta": lambda attention: transformers.RobertaModel(
        transformers.RobertaConfig(**_BERT, max_position_embeddings=40, attn_implementation=attention)
    ),
    "t5 encoder": lambda attention: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ENCODERS)
def test_text_encoders(name: str, attention: str) -> None:
    torch.manual_seed(0)
    axes = {"input_0": {0: B, 1: T}, "input_1": {0: B, 1: T}}
    runs = [(ids(*size), padding(*size)) for size in SIZES]
    check(Encoder(ENCODERS[name](attention)), *runs, dynamic_axes=axes, atol=1e-4, rtol=0)


def test_t5_decoder_step() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.T5Config(
                vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False
            )
            self.model = transformers.T5ForConditionalGeneration(config)

        def forward(self, tokens: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
            result = self.model(decoder_input_ids=tokens, encoder_outputs=(encoded,), use_cache=False)
            return result.logits

    torch.manual_seed(0)
    runs = [(ids(batch, length), torch.randn(batch, length + 3, 16)) for batch, length in SIZES]
    axes = {"input_0": {0: B, 1: "S"}, "input_1": {0: B, 1: T}}
    check(Decoder(), *runs, dynamic_axes=axes, atol=1e-4, rtol=0)


def test_whisper_encoder() -> None:
    class Audio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.WhisperConfig(
                d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=8,
                max_source_positions=20, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, vocab_size=30,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            )  # fmt: skip
            self.model = transformers.WhisperModel(config).encoder

        def forward(self, mel: torch.Tensor) -> torch.Tensor:
            return self.model(mel).last_hidden_state

    torch.manual_seed(0)
    runs = [(torch.randn(batch, 8, 40),) for batch in (2, 1, 3)]  # Whisper's length is fixed by its positions
    check(Audio(), *runs, dynamic_axes={"input_0": {0: B}}, atol=1e-4, rtol=0)


def test_wav2vec2() -> None:
    class Audio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.Wav2Vec2Config(
                vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
                num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            )  # fmt: skip
            self.model = transformers.Wav2Vec2Model(config)

        def forward(self, wave: torch.Tensor) -> torch.Tensor:
            return self.model(wave).last_hidden_state

    torch.manual_seed(0)
    runs = [(torch.randn(batch, 100 * length),) for batch, length in SIZES]
    check(Audio(), *runs, dynamic_axes={"input_0": {0: B, 1: T}}, atol=1e-4, rtol=0)


class ConvTasNet(nn.Module):
    """Encoder, dilated separable blocks, mask, decoder (Luo & Mesgarani 2019), small."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 16, 8, stride=4, bias=False)
        self.norm = nn.GroupNorm(1, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(16, 24, 1), nn.PReLU(), nn.GroupNorm(1, 24),
                nn.Conv1d(24, 24, 3, padding=dilation, dilation=dilation, groups=24), nn.PReLU(), nn.Conv1d(24, 16, 1),
            )
            for dilation in (1, 2, 4)
        )  # fmt: skip
        self.mask = nn.Conv1d(16, 32, 1)
        self.decoder = nn.ConvTranspose1d(16, 1, 8, stride=4, bias=False)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(wave[:, None])
        x = self.norm(encoded)
        for block in self.blocks:
            x = x + block(x)
        masks = self.mask(x).unflatten(1, (2, 16)).sigmoid()
        return torch.stack([self.decoder(encoded * masks[:, speaker])[:, 0] for speaker in range(2)], dim=1)


class DeepSpeech(nn.Module):
    """Convolutions over time, a bidirectional LSTM, a classifier per step (Amodei et al. 2015), small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=(2, 1), padding=1),
            nn.BatchNorm2d(4),
            nn.Hardtanh(0, 20),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.lstm = nn.LSTM(16, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        x = self.conv(spectrum[:, None]).transpose(2, 3).transpose(1, 2).flatten(2)
        return F.log_softmax(self.head(self.lstm(x)[0]), dim=-1)


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates and skips (van den Oord et al. 2016), small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**depth) for depth in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.head = nn.Conv1d(8, 6, 1)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x, total = self.first(wave[:, None]), 0
        for depth, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            value, opening = gate(F.pad(x, (2**depth, 0))).chunk(2, dim=1)
            gated = torch.tanh(value) * torch.sigmoid(opening)
            total = total + skip(gated)
            x = x + gated
        return self.head(F.relu(total))


class Perceiver(nn.Module):
    """Learnt latents that attend to a long input, then to themselves (Jaegle et al. 2021), small."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 16))
        self.cross = nn.MultiheadAttention(16, 2, kdim=6, vdim=6, batch_first=True)
        self.inner = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.cross(latents, x, x, need_weights=False)[0]
        return self.head(self.inner(latents).mean(1))


MODELS: dict[str, tuple[type[nn.Module], Callable[[int, int], Any], dict[int, str]]] = {
    "conv-tasnet": (ConvTasNet, lambda batch, length: torch.randn(batch, 20 * length), {0: B, 1: T}),
    "deepspeech": (DeepSpeech, lambda batch, length: torch.randn(batch, 8, 3 * length), {0: B, 2: T}),
    "wavenet": (WaveNet, lambda batch, length: torch.randn(batch, 5 * length), {0: B, 1: T}),
    "perceiver": (Perceiver, lambda batch, length: torch.randn(batch, length, 6), {0: B, 1: T}),
}


@pytest.mark.parametrize("name", MODELS)
def test_small_models_of_well_known_kinds(name: str) -> None:
    torch.manual_seed(0)
    model, make, axes = MODELS[name]
    check(model(), *[(make(*size),) for size in SIZES], dynamic_axes={"input_0": axes}, atol=1e-4, rtol=0)

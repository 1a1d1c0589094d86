"""torchaudio: its models, tiny, and its transforms; batch and length dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from t2n_llm.zoo.suites.case import Given, ModuleCase, Values, below, between, normal


def _model(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchaudio.models

        model: nn.Module = getattr(torchaudio.models, name)(*args, **options)
        return model

    return build


def _transform(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchaudio.transforms

        module: nn.Module = getattr(torchaudio.transforms, name)(*args, **options)
        return module

    return build


def _pitch_shift() -> nn.Module:
    module = _transform("PitchShift", 16000, 4, n_fft=64)()
    module(torch.zeros(1, 400))  # makes its kernel
    return module


class _Step(nn.Module):
    """One segment of a streaming model, whose states are four tensors for each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, *states: torch.Tensor) -> Any:
        """Return its results, the lengths and the next states."""
        layers = [list(states[first : first + 4]) for first in range(0, len(states), 4)]
        return self.model.infer(x, lengths, layers)  # type: ignore[operator]


def _transcriber() -> nn.Module:
    import torchaudio.models

    transcriber: nn.Module = torchaudio.models.emformer_rnnt_model(**_RNNT).transcriber
    return transcriber


def _full(shape: tuple[int, ...], generator: torch.Generator, *, length: int) -> torch.Tensor:
    return torch.full(shape, length)


def _complex(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.complex64)


def _sound(
    build: Callable[[], nn.Module], length: int, other: int, values: Values = normal, name: str = "x"
) -> ModuleCase:
    """Return a case that takes waveforms [B, T]."""
    return ModuleCase(build, {name: Given(("B", "T"), values)}, {"B": 2, "T": length}, {"B": 3, "T": other})


def _frames(
    build: Callable[[], nn.Module], bins: int, values: Values = normal, *, before: bool = True, other: int = 53
) -> ModuleCase:
    """Return a case that takes spectra [B, bins, T], or [B, T, bins]."""
    shape: tuple[int | str, ...] = ("B", bins, "T") if before else ("B", "T", bins)
    return ModuleCase(build, {"x": Given(shape, values)}, {"B": 2, "T": 40}, {"B": 3, "T": other})


def _with_lengths(
    build: Callable[[], nn.Module], shape: tuple[int | str, ...], length: int, **sizes: int
) -> ModuleCase:
    """Return a case whose lengths are those of whole sequences; the length is static, since they are numbers."""
    given = {"x": Given(shape), "lengths": Given(("B",), partial(_full, length=length))}
    return ModuleCase(build, given, {"B": 2, **sizes}, {"B": 3, **sizes})


def _step(build: Callable[[], nn.Module], width: int, frames: int, memory: int, left: int, features: int) -> ModuleCase:
    """Return a case of one segment after 40 frames: memory and left context are full then, and their sizes stay."""
    given = {"x": Given(("B", frames, features)), "lengths": Given(("B",), partial(_full, length=frames))}
    for layer in range(2):
        shapes = {"memory": memory, "keys": left, "values": left}
        given |= {f"{name}_{layer}": Given((count, "B", width)) for name, count in shapes.items()}
        given[f"past_{layer}"] = Given((1, "B"), partial(_full, length=40))
    return ModuleCase(lambda: _Step(build()), given, {"B": 2}, {"B": 3})


_RNNT = {
    "input_dim": 20,
    "encoding_dim": 32,
    "num_symbols": 10,
    "segment_length": 8,
    "right_context_length": 4,
    "time_reduction_input_dim": 8,
    "time_reduction_stride": 2,
    "transformer_num_heads": 2,
    "transformer_ffn_dim": 32,
    "transformer_num_layers": 2,
    "transformer_dropout": 0.0,
    "transformer_activation": "gelu",
    "transformer_left_context_length": 4,
    "transformer_max_memory_size": 0,
    "transformer_weight_init_scale_strategy": "depthwise",
    "transformer_tanh_on_mem": True,
    "symbol_embedding_dim": 16,
    "num_lstm_layers": 1,
    "lstm_layer_norm": True,
    "lstm_layer_norm_epsilon": 1e-3,
    "lstm_dropout": 0.0,
}
_EMFORMER = {"left_context_length": 3, "right_context_length": 1}
_WAV2VEC2 = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 2, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 16,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 2,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 64,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.0,
    "aux_num_out": 12,
}
_WAVLM = _WAV2VEC2 | {"encoder_num_buckets": 32, "encoder_max_distance": 80}
_SQUIM = {
    "feat_dim": 16,
    "win_len": 32,
    "d_model": 16,
    "nhead": 4,
    "hidden_dim": 16,
    "num_blocks": 1,
    "rnn_type": "LSTM",
    "chunk_size": 10,
}
_TAS = {
    "enc_num_feats": 16,
    "msk_num_feats": 8,
    "msk_num_hidden_feats": 16,
    "msk_num_layers": 2,
    "msk_num_stacks": 1,
}

_MODELS: Mapping[str, ModuleCase] = {
    "Conformer": _with_lengths(_model("Conformer", 16, 4, 32, 2, 7), ("B", 30, 16), 30),
    "ConvTasNet": ModuleCase(
        _model("ConvTasNet", **_TAS), {"x": Given(("B", 1, "T"))}, {"B": 2, "T": 1000}, {"B": 3, "T": 1504}
    ),
    "DeepSpeech": ModuleCase(
        _model("DeepSpeech", 16, 32, 10), {"x": Given(("B", 1, "T", 16))}, {"B": 2, "T": 40}, {"B": 3, "T": 53}
    ),
    "Emformer": _with_lengths(_model("Emformer", 16, 4, 32, 2, 4, right_context_length=1), ("B", 17, 16), 16),
    "Emformer of any length": _with_lengths(_model("Emformer", 16, 4, 32, 2, 4, **_EMFORMER), ("B", "T", 16), 16, T=17),
    "Emformer step": _step(_model("Emformer", 16, 4, 32, 2, 4, **_EMFORMER), 16, 5, 0, 3, 16),
    "Emformer with memory": _with_lengths(
        _model("Emformer", 16, 4, 32, 2, 4, max_memory_size=2, **_EMFORMER), ("B", 17, 16), 16
    ),
    "Emformer with memory, step": _step(
        _model("Emformer", 16, 4, 32, 2, 4, max_memory_size=2, **_EMFORMER), 16, 5, 2, 3, 16
    ),
    "HDemucs": ModuleCase(
        _model("HDemucs", ["drums", "other"], channels=8, nfft=1024, depth=4),
        {"x": Given(("B", 2, 16384))},
        {"B": 1},
        {"B": 2},
    ),
    "RNN-T transcriber": _with_lengths(_transcriber, ("B", 36, 20), 32),
    "RNN-T transcriber, step": _step(_transcriber, 16, 12, 0, 2, 20),
    "SquimObjective": _sound(_model("squim_objective_model", **_SQUIM), 800, 1200),
    "Wav2Letter": ModuleCase(
        _model("Wav2Letter", 10, "waveform", 1),
        {"x": Given(("B", 1, "T"))},
        {"B": 2, "T": 16000},
        {"B": 3, "T": 17000},
    ),
    "Wav2Letter of spectra": _frames(_model("Wav2Letter", 10, "mfcc", 16), 16),
    "Wav2Vec2Model": _sound(_model("wav2vec2_model", **_WAV2VEC2), 1600, 2411),
    "WavLM": _sound(_model("wavlm_model", **_WAVLM), 1600, 2411),
    "WaveRNN": ModuleCase(
        _model("WaveRNN", [2, 2, 2], 16, 8, 1, 16, 16, 5, 16, 32, 16),
        {"waveform": Given(("B", 1, 64)), "specgram": Given(("B", 1, 16, 12))},
        {"B": 2},
        {"B": 3},
    ),
}

_POSITIVE = between(0.1, 2.0)
_SPECTRA = partial(_frames, bins=33)

_TRANSFORMS: Mapping[str, ModuleCase] = {
    "AmplitudeToDB": _SPECTRA(_transform("AmplitudeToDB"), values=_POSITIVE),
    "ComputeDeltas": _SPECTRA(_transform("ComputeDeltas")),
    "Deemphasis": _sound(_transform("Deemphasis"), 100, 131),
    "Fade": _sound(_transform("Fade", 20, 20), 100, 131),
    "GriffinLim": _SPECTRA(_transform("GriffinLim", n_fft=64, n_iter=3, rand_init=False), values=_POSITIVE),
    "InverseMelScale": ModuleCase(
        _transform("InverseMelScale", 33, 8, 16000),
        {"x": Given(("B", 8, "T"), _POSITIVE)},
        {"B": 2, "T": 20},
        {"B": 3, "T": 31},
    ),
    "InverseSpectrogram": _SPECTRA(_transform("InverseSpectrogram", n_fft=64), values=_complex),
    "LFCC": _sound(_transform("LFCC", n_filter=16, n_lfcc=8, speckwargs={"n_fft": 64}), 400, 531),
    "MFCC": _sound(_transform("MFCC", 16000, 8, melkwargs={"n_fft": 64, "n_mels": 16}), 400, 531),
    "MelScale": _SPECTRA(_transform("MelScale", 8, 16000, n_stft=33), values=_POSITIVE),
    "MelSpectrogram": _sound(_transform("MelSpectrogram", 16000, n_fft=64, n_mels=8), 400, 531),
    "MuLawDecoding": _sound(_transform("MuLawDecoding"), 100, 131, below(256)),
    "MuLawEncoding": _sound(_transform("MuLawEncoding"), 100, 131, between(-1.0, 1.0)),
    "PitchShift": _sound(_pitch_shift, 400, 531),
    "Preemphasis": _sound(_transform("Preemphasis"), 100, 131),
    "Resample": _sound(_transform("Resample", 16000, 8000), 400, 531),
    "Resample up": _sound(_transform("Resample", 8000, 11025), 400, 531),
    "SlidingWindowCmn": _frames(_transform("SlidingWindowCmn", 10), 8, before=False),
    "SpectralCentroid": _sound(_transform("SpectralCentroid", 16000, n_fft=64), 400, 531),
    "Spectrogram": _sound(_transform("Spectrogram", n_fft=64), 400, 531),
    "Speed": _sound(_transform("Speed", 16000, 0.9), 400, 531),
    "TimeStretch": _SPECTRA(_transform("TimeStretch", n_freq=33, fixed_rate=1.25, hop_length=16), values=_complex),
    "Vol": _sound(_transform("Vol", 0.5), 100, 131),
    "AddNoise": ModuleCase(
        _transform("AddNoise"),
        {"x": Given(("B", "T")), "noise": Given(("B", "T")), "snr": Given(("B",))},
        {"B": 2, "T": 100},
        {"B": 3, "T": 131},
    ),
    "Convolve": ModuleCase(
        _transform("Convolve"), {"x": Given(("B", "T")), "y": Given(("B", 9))}, {"B": 2, "T": 100}, {"B": 3, "T": 131}
    ),
    "FFTConvolve": ModuleCase(
        _transform("FFTConvolve"), {"x": Given(("B", 100)), "y": Given(("B", 9))}, {"B": 2}, {"B": 3}
    ),
    "Loudness": ModuleCase(_transform("Loudness", 8000), {"x": Given((1, 8000))}, {}, {}),
    "PSD": ModuleCase(
        _transform("PSD"), {"x": Given(("B", 3, 33, "T"), _complex)}, {"B": 2, "T": 20}, {"B": 3, "T": 31}
    ),
}

CASES: Mapping[str, ModuleCase] = {**_MODELS, **_TRANSFORMS}

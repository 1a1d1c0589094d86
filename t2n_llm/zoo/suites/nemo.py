"""NeMo's speech recognition: the mel front end, tiny Conformers (CTC, RNN-T, TDT, chunk by chunk), prediction networks and joints.

NeMo's modules take keyword arguments only; `ByKeyword` gives each of them its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from t2n_llm.zoo.suites.case import BATCH, OTHER_BATCH, Given, ModuleCase, Values, below, normal

_FEATURES, _WIDTH, _CLASSES, _HIDDEN = 16, 32, 12, 24
_LETTERS = [chr(ord("a") + index) for index in range(_CLASSES)]

_ENCODER: Mapping[str, Any] = {
    "feat_in": _FEATURES,
    "n_layers": 2,
    "d_model": _WIDTH,
    "n_heads": 4,
    "ff_expansion_factor": 2,
    "conv_kernel_size": 9,
    "dropout": 0.0,
    "dropout_pre_encoder": 0.0,
    "dropout_emb": 0.0,
    "dropout_att": 0.0,
}
_CONFORMER = {"subsampling": "striding", "subsampling_factor": 4}
_FAST = {"subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 16}
_IN_CHUNKS = {
    "causal_downsampling": True,
    "conv_context_size": "causal",
    "conv_norm_type": "layer_norm",
    "att_context_size": [8, 1],
    "att_context_style": "chunked_limited",
}
CHUNK_FRAMES = 25  # nine of the chunk before, sixteen new ones: `streaming_cfg` of `_FAST` with `_IN_CHUNKS`


class ByKeyword(nn.Module):
    """A module whose forward takes its tensors by name."""

    def __init__(self, module: nn.Module, *names: str) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the module with each tensor under its name; what is None in its answer is left out."""
        answer = self.module(**dict(zip(self.names, tensors, strict=True)))
        return answer if isinstance(answer, torch.Tensor) else tuple(part for part in answer if part is not None)


class Recogniser(nn.Module):
    """Encoder and CTC decoder as one: features and their lengths in, log probabilities and lengths out."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log probabilities [B, S, classes + 1], and how many of each row count."""
        encoded, lengths = self.encoder(audio_signal=audio_signal, length=length)
        return self.decoder(encoder_output=encoded), lengths


class ChunkStep(nn.Module):
    """One step of a cache-aware encoder: a chunk and the caches in, what it says and the next caches out."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self,
        chunk: torch.Tensor,
        length: torch.Tensor,
        cache_last_channel: torch.Tensor,
        cache_last_time: torch.Tensor,
        cache_last_channel_len: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return encoded frames [B, D, S], their lengths, and three caches."""
        answer: tuple[torch.Tensor, ...] = self.encoder.cache_aware_stream_step(
            processed_signal=chunk,
            processed_signal_length=length,
            cache_last_channel=cache_last_channel,
            cache_last_time=cache_last_time,
            cache_last_channel_len=cache_last_channel_len,
            keep_all_outputs=False,
        )
        return answer


class PredictionStep(nn.Module):
    """One label through the prediction network, its two states beside it."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, label: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is predicted [B, 1, H], and the next states [layers, B, H]."""
        predicted, (next_hidden, next_cell) = self.network.predict(label, [hidden, cell], add_sos=False)
        return predicted, next_hidden, next_cell


class Joint(nn.Module):
    """The joint network: encoded frames [B, S, D] and predictions [B, U, H] in, scores [B, S, U, classes + 1 and durations] out."""

    def __init__(self, joint: Any) -> None:
        super().__init__()
        self.joint = joint

    def forward(self, encoded: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """Return scores, as log probabilities where the network takes them so."""
        scores: torch.Tensor = self.joint.joint(encoded, predicted)
        return scores


def encoder(**options: Any) -> nn.Module:
    """Return a tiny Conformer with random weights."""
    from nemo.collections.asr.modules import ConformerEncoder

    made: nn.Module = ConformerEncoder(**{**_ENCODER, **options})
    return made


def _recogniser(**options: Any) -> nn.Module:
    from nemo.collections.asr.modules import ConvASRDecoder

    return Recogniser(encoder(**options), ConvASRDecoder(feat_in=_WIDTH, num_classes=_CLASSES, vocabulary=_LETTERS))


def _encoder_alone(**options: Any) -> nn.Module:
    return ByKeyword(encoder(**options), "audio_signal", "length")


def _chunk_step() -> nn.Module:
    made: Any = encoder(**_FAST, **_IN_CHUNKS)
    made.setup_streaming_params()
    return ChunkStep(made)


def prediction_network() -> Any:
    """Return a tiny prediction network of RNN-T and TDT."""
    from nemo.collections.asr.modules import RNNTDecoder

    network = {"pred_hidden": _HIDDEN, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.0}
    return RNNTDecoder(prednet=network, vocab_size=_CLASSES)


def joint_network(durations: int = 0) -> Any:
    """Return a tiny joint network; a TDT's also scores how many frames to go on."""
    from nemo.collections.asr.modules import RNNTJoint

    network = {
        "encoder_hidden": _WIDTH,
        "pred_hidden": _HIDDEN,
        "joint_hidden": _HIDDEN,
        "activation": "relu",
        "dropout": 0.0,
    }
    return RNNTJoint(jointnet=network, num_classes=_CLASSES, num_extra_outputs=durations, vocabulary=_LETTERS)


def _preprocessor() -> nn.Module:
    from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor

    made = AudioToMelSpectrogramPreprocessor(features=_FEATURES, dither=0.0, pad_to=0)
    return ByKeyword(made, "input_signal", "length")


def _lengths(whole: int, shorter: int) -> Values:
    """Return what draws lengths: the first row's is the whole one, the others are shorter."""
    return lambda shape, generator: torch.where(torch.arange(shape[0]) == 0, whole, shorter)


def _frames(build: Callable[[], nn.Module]) -> ModuleCase:
    given = {"audio_signal": Given(("B", _FEATURES, "T")), "length": Given(("B",), _lengths(80, 64))}
    return ModuleCase(build, given, {"B": 2, "T": 80}, {"B": 3, "T": 93})


_CACHES: Mapping[str, Given] = {
    "cache_last_channel": Given((2, "B", 8, _WIDTH)),
    "cache_last_time": Given((2, "B", _WIDTH, 8)),
    "cache_last_channel_len": Given(("B",), lambda shape, generator: torch.arange(shape[0]) * 3 + 2),
}

CASES: Mapping[str, ModuleCase] = {
    "AudioToMelSpectrogramPreprocessor": ModuleCase(
        _preprocessor,
        {"input_signal": Given(("B", "T"), normal), "length": Given(("B",), _lengths(4000, 3000))},
        {"B": 2, "T": 4000},
        {"B": 3, "T": 5003},
    ),
    "ConformerCTC": _frames(partial(_recogniser, **_CONFORMER)),
    "FastConformerCTC": _frames(partial(_recogniser, **_FAST)),
    "FastConformer of RNN-T and TDT": _frames(partial(_encoder_alone, **_FAST)),
    "FastConformer, cache-aware, whole": _frames(partial(_encoder_alone, **_FAST, **_IN_CHUNKS)),
    "FastConformer, cache-aware, one chunk": ModuleCase(
        _chunk_step,
        {
            "chunk": Given(("B", _FEATURES, CHUNK_FRAMES)),
            "length": Given(("B",), _lengths(CHUNK_FRAMES, CHUNK_FRAMES)),
            **_CACHES,
        },
        BATCH,
        OTHER_BATCH,
    ),
    "RNNTDecoder, a label": ModuleCase(
        lambda: PredictionStep(prediction_network()),
        {
            "label": Given(("B", 1), below(_CLASSES)),
            "hidden": Given((1, "B", _HIDDEN)),
            "cell": Given((1, "B", _HIDDEN)),
        },
        BATCH,
        OTHER_BATCH,
    ),
    "RNNTJoint": ModuleCase(
        lambda: Joint(joint_network()),
        {"encoded": Given(("B", "S", _WIDTH)), "predicted": Given(("B", "U", _HIDDEN))},
        {"B": 2, "S": 7, "U": 3},
        {"B": 3, "S": 11, "U": 1},
    ),
    "RNNTJoint of TDT": ModuleCase(
        lambda: Joint(joint_network(durations=5)),
        {"encoded": Given(("B", "S", _WIDTH)), "predicted": Given(("B", "U", _HIDDEN))},
        {"B": 2, "S": 7, "U": 3},
        {"B": 3, "S": 11, "U": 1},
    ),
}

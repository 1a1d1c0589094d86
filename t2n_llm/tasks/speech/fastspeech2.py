"""FastSpeech2Conformer: an encoder and durations of the text, a decoder of repeated rows, and a HiFi-GAN, its own or beside it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.errors import OptionError
from t2n_llm.tasks.speech.arrays import Draws
from t2n_llm.tasks.speech.family import (
    TO_SPECTROGRAM,
    TO_WAVEFORM,
    SpeechFamily,
    SpeechPart,
    Utterance,
    VocoderModule,
    spectrogram_shape,
    vocoder_part,
)
from t2n_llm.tasks.speech.plan import (
    DURATIONS,
    FRAMES,
    IDS,
    LENGTH,
    NEAREST,
    ROWS,
    SPECTROGRAM,
    TEXT,
    TOKENS,
    WAVEFORM,
    Durations,
    Speaker,
    SpeechPlan,
)

_VECTOR, _NUMBER = "speaker_embedding", "speaker_id"
_RATE = 22_050  # of every published model: the configs have none
_POSITIONS = 5_000  # of its table; PyTorch makes a longer one where a text needs it
_VOCODER = "vocoder"


class FastSpeech2(SpeechFamily):
    """`(input_ids, [speaker]) -> (rows, durations)`, `frames -> spectrogram` and `spectrogram -> waveform`."""

    kind = TO_SPECTROGRAM
    usual_vocoder = "espnet/fastspeech2_conformer_hifigan"

    @property
    def own(self) -> Any:
        """The config of the model without its vocoder."""
        return self.config

    @property
    def vocabulary(self) -> int:
        """See `SpeechFamily.vocabulary`."""
        return int(self.own.vocab_size)

    @property
    def plan(self) -> SpeechPlan:
        """See `SpeechFamily.plan`."""
        config = self.own
        if config.num_languages is not None and config.num_languages > 1:
            raise OptionError(
                f"{type(config).__name__}: models of several languages are not supported.",
                "Use a model of one language, such as espnet/fastspeech2_conformer_with_hifigan.",
            )
        return SpeechPlan(
            sampling_rate=int(getattr(self._vocoder_config(), "sampling_rate", _RATE)),
            speaker=_speaker(config),
            durations=Durations(NEAREST, config.speaking_speed),
            most_tokens=_POSITIONS,
            most_frames=_POSITIONS,
        )

    def _vocoder_config(self) -> Any:
        return self.own_vocoder().config

    def parts(self, network: Any) -> tuple[SpeechPart, ...]:
        """See `SpeechFamily.parts`."""
        config, path = self.own, self._path()
        speaker = _speaker(config)
        voice: dict[str, tuple[int | str, ...]] = {}
        if speaker is not None:
            voice = {speaker.input: (1,) if speaker.width is None else (1, speaker.width)}
        text = FastSpeech2Text(network, path)
        frames = FastSpeech2Spectrogram(network, path)
        return (
            SpeechPart(TEXT, text, {IDS: (1, TOKENS), **voice}, (ROWS, DURATIONS)),
            SpeechPart(SPECTROGRAM, frames, {FRAMES: (1, LENGTH, config.hidden_size)}, (SPECTROGRAM,)),
            self._last_part(network),
        )

    def _path(self) -> str:
        """Return where the model is in the network."""
        return ""

    def _last_part(self, network: Any) -> SpeechPart:
        del network
        return vocoder_part(self.own_vocoder())

    def spoken(self, model: Any, ids: torch.Tensor, speaker: torch.Tensor | None, draws: Draws) -> Utterance:
        """See `SpeechFamily.spoken`."""
        del draws
        made = model(ids, return_dict=True, **_keyword(speaker))
        return Utterance({WAVEFORM: self._heard(made).numpy()})

    def _heard(self, made: Any) -> torch.Tensor:
        waveform: torch.Tensor = self.vocoder_network(made.spectrogram)
        return waveform


class FastSpeech2WithHifiGan(FastSpeech2):
    """The same with a vocoder in one checkpoint."""

    kind = TO_WAVEFORM

    @property
    def own(self) -> Any:
        """See `FastSpeech2.own`."""
        return self.config.model_config

    def _vocoder_config(self) -> Any:
        self.refuse_vocoder()
        return self.config.vocoder_config

    def _path(self) -> str:
        return "model"

    def _last_part(self, network: Any) -> SpeechPart:
        module = VocoderModule(network, _VOCODER)
        return SpeechPart(WAVEFORM, module, spectrogram_shape(self.config.vocoder_config), (WAVEFORM,))

    def _heard(self, made: Any) -> torch.Tensor:
        waveform: torch.Tensor = made.waveform
        return waveform


def _speaker(config: Any) -> Speaker | None:
    if config.speaker_embed_dim:
        return Speaker(_VECTOR, width=config.speaker_embed_dim)
    several = config.num_speakers is not None and config.num_speakers > 1
    return Speaker(_NUMBER, count=config.num_speakers) if several else None


def _keyword(speaker: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if speaker is None:
        return {}
    return {_VECTOR: speaker} if speaker.is_floating_point() else {"speaker_ids": speaker}


class FastSpeech2Text(nn.Module):
    """Makes the decoder's row of each token, and how many frames it takes."""

    def __init__(self, network: Any, path: str) -> None:
        """Wrap a network; `path` says where the model is in it."""
        super().__init__()
        self.network = network
        self.path = path

    def forward(self, input_ids: torch.Tensor, *speaker: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [1, S, D] and durations [1, S], which are not rounded.

        Args:
            input_ids: i64 [1, S].
            speaker: i64 [1] or f32 [1, D] where there are several.
        """
        model = self.network.get_submodule(self.path)
        with _positions_kept(model.encoder):
            hidden = model.encoder(input_ids, None, return_dict=True).last_hidden_state
        for voice in speaker:
            hidden = _with_voice(model, hidden, voice)
        pitch, energy = model.pitch_predictor(hidden), model.energy_predictor(hidden)
        predictor, states = model.duration_predictor, hidden.transpose(1, 2)
        for layer in predictor.conv_layers:
            states = layer(states)
        log_durations = predictor.linear(states.transpose(1, 2)).squeeze(-1)
        rows = hidden + model.energy_embed(energy) + model.pitch_embed(pitch)
        return rows, log_durations.exp() - predictor.log_domain_offset


def _with_voice(model: Any, hidden: torch.Tensor, voice: torch.Tensor) -> torch.Tensor:
    if not voice.is_floating_point():
        added: torch.Tensor = hidden + model.speaker_id_embedding(voice)[:, None]
        return added
    vector = nn.functional.normalize(voice)[:, None].expand(-1, hidden.shape[1], -1)
    projected: torch.Tensor = model.projection(torch.cat((hidden, vector), dim=-1))
    return projected


class FastSpeech2Spectrogram(nn.Module):
    """Makes a spectrogram of frames."""

    def __init__(self, network: Any, path: str) -> None:
        """Wrap a network; `path` says where the model is in it."""
        super().__init__()
        self.network = network
        self.path = path

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return [1, F * reduction_factor, mel] of rows of the text [1, F, D]."""
        model = self.network.get_submodule(self.path)
        with _positions_kept(model.decoder):
            decoded = model.decoder(frames, None, return_dict=True).last_hidden_state
        _, spectrogram = model.speech_decoder_postnet(decoded)
        made: torch.Tensor = spectrogram
        return made


def _positions_kept(encoder: Any) -> AbstractContextManager[Any]:
    """Let an encoder read its table of positions, without the assignment that makes it longer where a text is."""
    encoding = encoder.pos_enc

    def placed(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table, length = encoding.pos_enc, states.shape[1]
        center = table.shape[1] // 2
        return states * encoding.input_scale, table[:, center - length + 1 : center + length]

    return mock.patch.object(encoding, "forward", placed)

"""VITS (MMS-TTS): an encoder and durations of the text; a flow and a HiFi-GAN make the waveform of repeated rows.

What its code decides by values or by lengths is written for any: splines inside and outside of their interval, relative positions.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from t2n_llm.compat import vits_replaced, vits_spline
from t2n_llm.tasks.speech.arrays import Draws
from t2n_llm.tasks.speech.family import TO_WAVEFORM, SpeechFamily, SpeechPart, Utterance, drawn_from
from t2n_llm.tasks.speech.plan import (
    DURATIONS,
    FRAMES,
    IDS,
    LENGTH,
    ROWS,
    TEXT,
    TOKENS,
    UP,
    WAVEFORM,
    Durations,
    Noise,
    Speaker,
    SpeechPlan,
)

_SPEAKER = "speaker_id"
_TEXT_NOISE, _WAVEFORM_NOISE = "duration_noise", "noise"


class Vits(SpeechFamily):
    """`(input_ids, [duration_noise], [speaker_id]) -> (rows, durations)`, and `(frames, noise, [speaker_id]) -> waveform`."""

    kind = TO_WAVEFORM

    @property
    def plan(self) -> SpeechPlan:
        """See `SpeechFamily.plan`."""
        self.refuse_vocoder()
        config = self.config
        noise = {_WAVEFORM_NOISE: Noise([1, config.flow_size, LENGTH], config.noise_scale)}
        if config.use_stochastic_duration_prediction:
            noise = {_TEXT_NOISE: Noise([1, 2, TOKENS], config.noise_scale_duration)} | noise
        return SpeechPlan(
            sampling_rate=config.sampling_rate,
            noise=noise,
            speaker=Speaker(_SPEAKER, count=config.num_speakers) if config.num_speakers > 1 else None,
            durations=Durations(UP, 1.0 / config.speaking_rate),
        )

    def parts(self, network: Any) -> tuple[SpeechPart, ...]:
        """See `SpeechFamily.parts`."""
        plan = self.plan
        speaker: dict[str, tuple[int | str, ...]] = {_SPEAKER: (1,)} if plan.speaker is not None else {}
        noise = {name: tuple(each.shape) for name, each in plan.noise.items()}
        drawn = noise.pop(_WAVEFORM_NOISE)
        frames = (1, LENGTH, 2 * self.config.flow_size)
        return (
            SpeechPart(TEXT, VitsText(network), {IDS: (1, TOKENS), **noise, **speaker}, (ROWS, DURATIONS)),
            SpeechPart(
                WAVEFORM, VitsWaveform(network), {FRAMES: frames, _WAVEFORM_NOISE: drawn, **speaker}, (WAVEFORM,)
            ),
        )

    def spoken(self, model: Any, ids: torch.Tensor, speaker: torch.Tensor | None, draws: Draws) -> Utterance:
        """See `SpeechFamily.spoken`."""
        with drawn_from(lambda sizes: torch.from_numpy(draws.normal(sizes))):
            waveform = model(ids, speaker_id=int(speaker) if speaker is not None else None).waveform
        return Utterance({WAVEFORM: waveform.numpy()})


class VitsText(nn.Module):
    """Makes prior means and log variances of each token, and how many frames it takes."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, *further: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [1, S, 2 * flow_size] and durations [1, S], which are not rounded.

        Args:
            input_ids: i64 [1, S].
            further: noise [1, 2, S] where durations are drawn, and the speaker i64 [1] where there are several.
        """
        network, predictor = self.network, self.network.duration_predictor
        stochastic = network.config.use_stochastic_duration_prediction
        speaker = _speaker(network, further[stochastic:])
        mask = torch.ones_like(input_ids)[..., None].to(network.text_encoder.project.weight.dtype)
        with _of_any_length(), drawn_from(lambda _: further[0]):
            read = network.text_encoder(input_ids=input_ids, padding_mask=mask, return_dict=True)
            hidden, mask = read.last_hidden_state.transpose(1, 2), mask.transpose(1, 2)
            if stochastic:
                log_durations = predictor(hidden, mask, speaker, reverse=True, noise_scale=1.0)
            else:
                log_durations = predictor(hidden, mask, speaker)
        return torch.cat((read.prior_means, read.prior_log_variances), dim=-1), torch.exp(log_durations)[:, 0]


class VitsWaveform(nn.Module):
    """Makes the waveform of frames."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, frames: torch.Tensor, noise: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
        """Return samples [1, N].

        Args:
            frames: [1, F, 2 * flow_size], rows of the text.
            noise: [1, flow_size, F].
            further: the speaker i64 [1] where there are several.
        """
        network, speaker = self.network, _speaker(self.network, further)
        means, log_variances = frames.transpose(1, 2).chunk(2, dim=1)
        latents = means + noise * torch.exp(log_variances)
        with _of_any_length():
            spectrogram = network.flow(latents, torch.ones_like(latents[:, :1]), speaker, reverse=True)
            waveform: torch.Tensor = network.decoder(spectrogram, speaker)
        return waveform[:, 0]


def _speaker(network: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    return network.embed_speaker(given[0])[..., None] if given else None


# --- for any length, and for values that are not known ------------------------------------------------


def _of_any_length() -> AbstractContextManager[None]:
    return vits_replaced(_spline, _gated, _relative_embeddings)


def _spline(
    inputs: torch.Tensor,
    widths: torch.Tensor,
    heights: torch.Tensor,
    derivatives: torch.Tensor,
    reverse: bool = False,
    tail_bound: float = 5.0,
    min_bin_width: float = 1e-3,
    min_bin_height: float = 1e-3,
    min_derivative: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the spline of every value, and choose: transformers picks those inside of the interval, whose number is not known."""
    edge = torch.full_like(derivatives[..., :1], math.log(math.exp(1 - min_derivative) - 1))
    inner, determinants = vits_spline(
        inputs.clamp(-tail_bound, tail_bound),
        widths,
        heights,
        torch.cat((edge, derivatives, edge), dim=-1),
        reverse,
        tail_bound,
        min_bin_width,
        min_bin_height,
        min_derivative,
    )
    inside = (inputs >= -tail_bound) & (inputs <= tail_bound)
    return torch.where(inside, inner, inputs), torch.where(inside, determinants, torch.zeros_like(determinants))


def _gated(states: torch.Tensor, further: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Take both halves as views: transformers cuts at a number that it keeps in a tensor."""
    del channels
    first, second = (states + further).chunk(2, dim=1)
    return torch.tanh(first) * torch.sigmoid(second)


def _relative_embeddings(attention: Any, embeddings: torch.Tensor, length: int) -> torch.Tensor:
    """Return [1, 2 * length - 1, D], zeros outside of the window: padded alike for all lengths, then cut."""
    padded = nn.functional.pad(embeddings, [0, 0, length, length])
    start = attention.window_size + 1
    return padded[:, start : start + 2 * length - 1]

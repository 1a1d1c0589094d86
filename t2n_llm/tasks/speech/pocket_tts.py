"""Pocket TTS and Gradium Phonon: a language model of latents, a flow that draws the next one from noise, and a codec's decoder.

The prompt is a voice (latents) and a text. Its last position holds a latent of the model's own, so it is the first step. The codec
is a model beside it, as a vocoder is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export.errors import OptionError
from t2n_llm.source.empty_model import instantiate
from t2n_llm.source.vocoder import CODECS
from t2n_llm.tasks.speech.arrays import Draws
from t2n_llm.tasks.speech.decoder_cache import cache_states, filled_cache, handed_over, inputs_of, largest_in
from t2n_llm.tasks.speech.family import (
    TO_WAVEFORM,
    SpeechFamily,
    SpeechPart,
    Utterance,
    drawn_from,
)
from t2n_llm.tasks.speech.plan import (
    FRAME,
    FRAMES,
    IDS,
    LENGTH,
    RECORDING,
    STEP,
    STOP,
    TEXT,
    TOKENS,
    VOICE,
    VOICE_LENGTH,
    WAVEFORM,
    Noise,
    Speaker,
    SpeechPlan,
    Steps,
    Template,
)

_VOICE, _NOISE, _ROLE = "audio_prompt_latents", "noise", "user"
_OTHER_VOICES = "audio_prompt_dim"  # of configs whose voices are latents of another codec (Phonon)
_PLACEHOLDERS = ("audio_prompt_bos_token_id", "audio_prompt_token_id", "audio_bos_token_id", "audio_latent_token_id")
_PADDING = 3  # tokens before are padding and the like
# What transformers takes where generation_config.json and processor_config.json say nothing.
_FLOW_STEPS, _THRESHOLD, _LEAST_FRAMES = 1, -4.0, 6
_FRAMES_AFTER, _FRAMES_AFTER_SHORT, _SHORT_WORDS = 2, 4, 4
_FADE_SECONDS = 0.005
# PocketTTSGenerationMixin.generate: (tokens / 3 + 2) seconds at most.
_SECONDS_PER_TOKEN, _SECONDS_BEYOND = 1 / 3, 2


class PocketTts(SpeechFamily):
    """`(input_ids, voice) -> (frame, KV cache)`, `(frame, noise, KV cache) -> (frames, stop, KV cache)`, `frames -> waveform`."""

    kind = TO_WAVEFORM
    vocoders = CODECS
    makes = "latents of a codec"
    usual_vocoder = "eustlb/pocket-tts-audio-tokenizer"

    @property
    def text_tokens(self) -> range:
        """See `SpeechFamily.text_tokens`: those of one side of the placeholders."""
        first, last = min(self._placeholders), max(self._placeholders)
        return range(_PADDING, first) if first > self.vocabulary // 2 else range(last + 1, self.vocabulary)

    @property
    def plan(self) -> SpeechPlan:
        """See `SpeechFamily.plan`."""
        config = self.config
        return SpeechPlan(
            sampling_rate=int(self.own_vocoder().config.sampling_rate),
            noise={_NOISE: Noise([1, config.latent_dim], self._noise_scale)},
            speaker=Speaker(_VOICE, width=self._voice_width, rows=True, frame=self._frame),
            steps=self._steps,
            template=Template(_ROLE, left_out=sorted(self._placeholders)),
        )

    def parts(self, network: Any) -> tuple[SpeechPart, ...]:
        """See `SpeechFamily.parts`."""
        config, vocoder = self.config, self.own_vocoder()
        states = cache_states(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        cache = inputs_of(states)
        frame: tuple[int | str, ...] = (1, 1, config.latent_dim)
        codec = instantiate(vocoder.kind, vocoder.config, torch.float32, "eager", "eager", trust_remote_code=False)
        return (
            SpeechPart(
                TEXT,
                PocketTtsText(network),
                {IDS: (1, TOKENS), _VOICE: (1, VOICE_LENGTH, self._voice_width)},
                (FRAME, *cache),
                handed=handed_over(states),
            ),
            SpeechPart(
                STEP,
                PocketTtsStep(network, self._flow_steps),
                {FRAME: frame, _NOISE: (1, config.latent_dim), **cache},
                (FRAMES, STOP, *(state.output_name for state in states)),
                states=states,
            ),
            SpeechPart(
                WAVEFORM,
                CodecDecoder(codec, self._fade_seconds),
                {FRAMES: (1, LENGTH, config.latent_dim)},
                (WAVEFORM,),
                vocoder=vocoder,
            ),
            *self._voice_part(codec),
        )

    def _voice_part(self, codec: Any) -> tuple[SpeechPart, ...]:
        if self._frame is None:
            return ()
        inputs: dict[str, tuple[int | str, ...]] = {RECORDING: (1, VOICE_LENGTH, self._frame)}
        return (SpeechPart(VOICE, CodecEncoder(codec), inputs, (_VOICE,), vocoder=self.own_vocoder()),)

    def heard(self, recording: np.ndarray) -> Mapping[str, np.ndarray]:
        """See `SpeechFamily.heard`."""
        return {_VOICE: CodecEncoder(self.vocoder_network)(torch.from_numpy(recording)).numpy()}

    def spoken(self, model: Any, ids: torch.Tensor, speaker: torch.Tensor | None, draws: Draws) -> Utterance:
        """See `SpeechFamily.spoken`."""
        if speaker is None:
            raise OptionError(
                "the model speaks with the voice of a file, and none was given.", "Pass --speaker FILE.npy."
            )
        steps, scale = self._steps, self._noise_scale
        with drawn_from(lambda sizes: torch.from_numpy(draws.normal(sizes))):
            made = model.generate(
                torch.cat(
                    [prompt_of(self.config, ids, speaker), ids.new_full((1, 1), self.config.audio_bos_token_id)], 1
                ),
                audio_prompt_latents=speaker,
                frames_after_eos=steps.frames_after(None),
                max_new_tokens=steps.most(ids.shape[1]),
                do_sample=scale > 0,
                temperature=scale**2 or 1.0,
                num_flow_steps=self._flow_steps,
                eos_threshold=steps.threshold,
                min_frames_before_eos=steps.least,
                return_dict_in_generate=True,
                output_logits=True,
            )
        waveform = CodecDecoder(self.vocoder_network, self._fade_seconds)(made.audio_latents)
        answer = {FRAMES: made.audio_latents, STOP: torch.cat(made.logits), WAVEFORM: waveform}
        return Utterance({name: tensor.numpy() for name, tensor in answer.items()}, largest_in((made.cache,)))

    @property
    def _frame(self) -> int | None:
        """Samples of a frame of the codec, if it makes the latents of voices too."""
        codec = self.own_vocoder().config
        makes_voices = not hasattr(self.config, _OTHER_VOICES) and codec.encoder_config is not None
        return int(codec.frame_size) if makes_voices else None

    @property
    def _steps(self) -> Steps:
        config, said = self.config, self.settings
        rate = float(config.frame_rate)
        return Steps(
            config.latent_dim,
            float(said.get("eos_threshold", _THRESHOLD)),
            rate * _SECONDS_PER_TOKEN,
            config.max_position_embeddings,
            most_beyond=int(rate * _SECONDS_BEYOND),
            least=int(said.get("min_frames_before_eos", _LEAST_FRAMES)),
            after=int(said.get("frames_after_eos", _FRAMES_AFTER)),
            after_short=int(said.get("frames_after_eos_short_text", _FRAMES_AFTER_SHORT)),
            short_words=int(said.get("short_text_max_words", _SHORT_WORDS)),
        )

    @property
    def _noise_scale(self) -> float:
        """Standard deviation of the noise: transformers' temperature is its variance."""
        sampled = bool(self.settings.get("do_sample", False))
        return math.sqrt(float(self.settings.get("temperature", 1.0))) if sampled else 0.0

    @property
    def _flow_steps(self) -> int:
        return int(self.settings.get("num_flow_steps", _FLOW_STEPS))

    @property
    def _voice_width(self) -> int:
        return int(getattr(self.config, _OTHER_VOICES, self.config.latent_dim))

    @property
    def _placeholders(self) -> set[int]:
        """Tokens that stand for sound in transformers' prompts."""
        return {token for name in _PLACEHOLDERS if (token := getattr(self.config, name, None)) is not None}

    @property
    def _fade_seconds(self) -> float:
        return float(self.settings.get("fade_in_duration", _FADE_SECONDS))


def prompt_of(config: Any, ids: torch.Tensor, voice: torch.Tensor) -> torch.Tensor:
    """Return transformers' prompt i64 [1, N] up to the first latent: placeholders of a voice [1, V, D], then a text i64 [1, S]."""
    before = getattr(config, "audio_prompt_bos_token_id", None)
    begun = [] if before is None else [ids.new_full((1, 1), before)]
    return torch.cat([*begun, ids.new_full((1, voice.shape[1]), config.audio_prompt_token_id), ids], dim=1)


class PocketTtsText(nn.Module):
    """Reads a voice and a text."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, voice: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the first frame of the steps [1, 1, latent], then keys and values [1, H, N, D] of each layer.

        Args:
            input_ids: of the text alone, i64 [1, S].
            voice: latents f32 [1, V, D].
        """
        network = self.network
        ids = prompt_of(network.config, input_ids, voice)
        cache = filled_cache(network.config)
        network.model(input_ids=ids, audio_prompt_latents=voice, cache=cache, use_cache=True)
        first = network.denormalize_latents(network.model.bos_latent)[None, None]
        return first, *cache.states().values()


class PocketTtsStep(nn.Module):
    """Makes the next latent of those before."""

    def __init__(self, network: Any, flow_steps: int) -> None:
        """Wrap a network.

        Args:
            network: of transformers.
            flow_steps: from noise to a latent.
        """
        super().__init__()
        self.network, self._flow_steps = network, flow_steps

    def forward(self, frame: torch.Tensor, noise: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model once.

        Args:
            frame: the latent before, f32 [1, 1, latent], as the codec reads it.
            noise: f32 [1, latent].
            states: keys and values [1, H, P, D] of each layer.

        Returns:
            The next latent [1, 1, latent], the logit [1] that speech ends with it, then the states after it.
        """
        network = self.network
        cache = filled_cache(network.config, states)
        ids = torch.full((1, 1), network.config.audio_latent_token_id, dtype=torch.int64, device=frame.device)
        latent = (frame - network.latent_mean) / network.latent_std
        hidden = network.model(input_ids=ids, audio_latents=latent, cache=cache, use_cache=True).last_hidden_state[
            :, -1
        ]
        made = network.denormalize_latents(network.sample_latent(hidden, noise, self._flow_steps))
        return made[:, None], network.eos_head(hidden)[:, 0], *cache.states().values()


class CodecEncoder(nn.Module):
    """Makes latents of a recording."""

    def __init__(self, network: Any) -> None:
        """Wrap a codec."""
        super().__init__()
        self.network = network

    def forward(self, recording: torch.Tensor) -> torch.Tensor:
        """Return latents [1, V, D] of samples [1, V, frame]."""
        latents: torch.Tensor = self.network.encode(recording.flatten(1)[:, None]).latents
        return latents


class CodecDecoder(nn.Module):
    """Makes a waveform of latents, faded in as `PocketTTSProcessor.decode` does."""

    def __init__(self, network: Any, fade_seconds: float) -> None:
        """Wrap a network.

        Args:
            network: the codec.
            fade_seconds: how long the sound gets louder at first.
        """
        super().__init__()
        self.network = network
        self._fade = int(fade_seconds * network.config.sampling_rate)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return samples [1, N] of latents [1, F, D]."""
        sound: torch.Tensor = self.network.decode(frames).audio_values[:, 0]
        if self._fade < 2:
            return sound
        loudness = torch.arange(sound.shape[1], device=sound.device, dtype=sound.dtype) / (self._fade - 1)
        return sound * loudness.clamp(max=1.0)


__all__ = ["CodecDecoder", "CodecEncoder", "PocketTts", "PocketTtsStep", "PocketTtsText", "prompt_of"]

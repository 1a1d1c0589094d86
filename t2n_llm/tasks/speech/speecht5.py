"""SpeechT5: keys and values of the text, a decoder that makes a few frames a step until it says stop, a postnet, and a vocoder.

Dropout in front of the decoder is part of the model also when it speaks: its masks are an input of each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from kvcache.states.tensors import Slot
from t2n_llm.check.cache_range import largest_values
from t2n_llm.tasks.seq2seq.model import CROSS_KEY, CROSS_VALUE, pair_of_caches, states_of_pair
from t2n_llm.tasks.speech.arrays import Draws, drawn
from t2n_llm.tasks.speech.decoder_cache import cache_states, inputs_of
from t2n_llm.tasks.speech.family import (
    TO_SPECTROGRAM,
    SpeechFamily,
    SpeechPart,
    Utterance,
    vocoder_part,
)
from t2n_llm.tasks.speech.plan import (
    FRAME,
    FRAMES,
    IDS,
    KEPT,
    LENGTH,
    SPECTROGRAM,
    STEP,
    STOP,
    TEXT,
    TOKENS,
    WAVEFORM,
    Noise,
    Speaker,
    SpeechPlan,
    Steps,
)

_SPEAKER, _DROPOUT = "speaker_embeddings", "dropout"
# The defaults of transformers' generate_speech.
_THRESHOLD, _MOST_FRAMES_PER_TOKEN = 0.5, 20.0


class SpeechT5(SpeechFamily):
    """`input_ids -> cross_*`, `(frame, ...) -> (frames, stop, ...)`, `frames -> spectrogram`, `spectrogram -> waveform`."""

    kind = TO_SPECTROGRAM
    usual_vocoder = "microsoft/speecht5_hifigan"

    @property
    def plan(self) -> SpeechPlan:
        """See `SpeechFamily.plan`."""
        config = self.config
        shape = [config.speech_decoder_prenet_layers, config.speech_decoder_prenet_units]
        return SpeechPlan(
            sampling_rate=int(self.own_vocoder().config.sampling_rate),
            noise={_DROPOUT: Noise([*shape], 1.0, KEPT, config.speech_decoder_prenet_dropout)},
            speaker=Speaker(_SPEAKER, width=config.speaker_embedding_dim),
            steps=Steps(
                config.num_mel_bins,
                _THRESHOLD,
                _MOST_FRAMES_PER_TOKEN / config.reduction_factor,
                config.max_speech_positions,
            ),
            most_tokens=config.max_text_positions,
        )

    def parts(self, network: Any) -> tuple[SpeechPart, ...]:
        """See `SpeechFamily.parts`."""
        config, layers = self.config, range(self.config.decoder_layers)
        heads = config.decoder_attention_heads
        width = config.hidden_size // heads
        cross = tuple(f"{kind}_{layer}" for layer in layers for kind in (CROSS_KEY, CROSS_VALUE))
        states = cache_states(config.decoder_layers, heads, width)
        inputs: dict[str, tuple[int | str, ...]] = {
            FRAME: (1, 1, config.num_mel_bins),
            _DROPOUT: tuple(self.plan.noise[_DROPOUT].shape),
            _SPEAKER: (1, config.speaker_embedding_dim),
            **dict.fromkeys(cross, (1, heads, TOKENS, width)),
            **inputs_of(states),
        }
        outputs = (FRAMES, STOP, *(state.output_name for state in states))
        return (
            SpeechPart(
                TEXT,
                SpeechT5Text(network),
                {IDS: (1, TOKENS)},
                cross,
                handed=dict.fromkeys(cross, (1, heads, 1, width)),
            ),
            SpeechPart(STEP, SpeechT5Step(network), inputs, outputs, states=states),
            SpeechPart(
                SPECTROGRAM, SpeechT5Postnet(network), {FRAMES: (1, LENGTH, config.num_mel_bins)}, (SPECTROGRAM,)
            ),
            vocoder_part(self.own_vocoder()),
        )

    def spoken(self, model: Any, ids: torch.Tensor, speaker: torch.Tensor | None, draws: Draws) -> Utterance:
        """See `SpeechFamily.spoken`."""
        with _recorded(model) as record, _dropout_from(self.plan, draws):
            waveform = model.generate_speech(
                ids,
                speaker,
                threshold=_THRESHOLD,
                minlenratio=float(self.config.reduction_factor),  # a step for each token, whatever random weights say
                maxlenratio=_MOST_FRAMES_PER_TOKEN,
                vocoder=self.vocoder_network,
            )
        made = {FRAMES: record.frames[0], STOP: torch.stack(record.stops), WAVEFORM: waveform[None]}
        kept = {slot: tensor.numpy() for slot, tensor in states_of_pair(record.cache).items()}
        return Utterance({name: tensor.numpy() for name, tensor in made.items()}, largest_values(kept))


class SpeechT5Text(nn.Module):
    """Makes keys and values of a text for each layer of the decoder."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return keys and values [1, H, S, D] of ids i64 [1, S]."""
        model = self.network.speecht5
        hidden = model.encoder(input_values=input_ids, return_dict=True).last_hidden_state
        made: list[torch.Tensor] = []
        for layer in model.decoder.wrapped_decoder.layers:
            attention = layer.encoder_attn
            for project in (attention.k_proj, attention.v_proj):
                heads = project(hidden).unflatten(-1, (attention.num_heads, attention.head_dim))
                made.append(heads.transpose(1, 2))
        return tuple(made)


class SpeechT5Step(nn.Module):
    """Makes the next frames of those before."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(
        self, frame: torch.Tensor, dropout: torch.Tensor, speaker: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the decoder once.

        Args:
            frame: [1, 1, mel], the last one, or zeros.
            dropout: [layers, units], 1 for what the prenet keeps.
            speaker: [1, D].
            states: keys and values [1, H, S, D] of the text, then those [1, H, P, D] of the steps before.

        Returns:
            Frames [1, reduction_factor, mel], the probability [1] that they are the last, then the states after them.
        """
        network, decoder = self.network, self.network.speecht5.decoder
        count = len(decoder.wrapped_decoder.layers)
        kinds = (CROSS_KEY, CROSS_VALUE), ("cache_key", "cache_value")
        slots = [Slot(kind, layer) for pair in kinds for layer in range(count) for kind in pair]
        caches = pair_of_caches(network, dict(zip(slots, states, strict=True)))
        text, past = states[0], states[2 * count].shape[2]
        rows = iter(dropout[:, None])
        with _at_position(decoder.prenet.encode_positions, past), _bernoulli(lambda _: next(rows)):
            hidden = decoder.prenet(frame, speaker)
        made = decoder.wrapped_decoder(
            hidden_states=hidden,
            # Its values are never read: every layer has its keys and values already.
            encoder_hidden_states=text.new_zeros((1, text.shape[2], hidden.shape[-1])),
            cache=caches,
            use_cache=True,
            return_dict=True,
        )
        postnet, last = network.speech_decoder_postnet, made.last_hidden_state[:, 0]
        frames = postnet.feat_out(last).unflatten(-1, (network.config.reduction_factor, network.config.num_mel_bins))
        after = states_of_pair(made.cache)
        return frames, torch.sigmoid(postnet.prob_out(last)).sum(dim=-1), *(after[slot] for slot in slots[2 * count :])


class SpeechT5Postnet(nn.Module):
    """Makes a spectrogram of frames."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return [1, F, mel] of frames [1, F, mel]."""
        made: torch.Tensor = self.network.speech_decoder_postnet.postnet(frames)
        return made


@contextmanager
def _at_position(positions: Any, past: int) -> Iterator[None]:
    """Let one frame have the position that follows those before: transformers computes all frames again in each step."""

    def placed(embedded: torch.Tensor) -> torch.Tensor:
        return embedded + positions.alpha * positions.pe[:, past : past + 1]

    with mock.patch.object(positions, "forward", placed):
        yield


def _bernoulli(draw: Any) -> Any:
    return mock.patch.object(torch, "bernoulli", lambda like, **_: draw(like))


@contextmanager
def _dropout_from(plan: SpeechPlan, draws: Draws) -> Iterator[None]:
    """Let each call of the prenet have masks of its own: all frames of a step get that of the last one, which alone is read."""
    rows: Iterator[np.ndarray] = iter(())

    def masked(like: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        row = next(rows, None)
        if row is None:
            rows = iter(drawn(plan.noise[_DROPOUT], draws, {}))
            row = next(rows)
        return torch.from_numpy(row).expand_as(like)

    with _bernoulli(masked):
        yield


class _Record:
    """What a model makes while it speaks."""

    def __init__(self) -> None:
        self.frames: list[torch.Tensor] = []
        self.stops: list[torch.Tensor] = []
        self.cache: Any = None


@contextmanager
def _recorded(model: Any) -> Iterator[_Record]:
    """Record the frames before the postnet, the stop probabilities and the cache, for the length of the block."""
    record, postnet = _Record(), model.speech_decoder_postnet
    own = postnet.postnet

    def refined(frames: torch.Tensor) -> torch.Tensor:
        record.frames.append(frames)
        made: torch.Tensor = own(frames)
        return made

    def stopped(_module: nn.Module, _given: Any, logits: torch.Tensor) -> None:
        record.stops.append(torch.sigmoid(logits).sum(dim=-1)[0])

    def decoded(_module: nn.Module, _given: Any, made: Any) -> None:
        record.cache = made.cache

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(postnet, "postnet", refined))
        stack.callback(postnet.prob_out.register_forward_hook(stopped).remove)
        stack.callback(model.speecht5.decoder.wrapped_decoder.register_forward_hook(decoded).remove)
        yield record

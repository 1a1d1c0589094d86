"""CSM: a language model of frames of codes, a second one that makes a frame code by code, and the decoder of its codec.

The first model makes the logits of a frame's first code. The second one reads its hidden state, then a code at a time; its cache
holds one frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from t2n_llm.tasks.speech.arrays import Draws
from t2n_llm.tasks.speech.decoder_cache import cache_states, filled_cache, handed_over, inputs_of, largest_in
from t2n_llm.tasks.speech.family import TO_WAVEFORM, SpeechFamily, SpeechPart, Utterance
from t2n_llm.tasks.speech.plan import (
    CODE,
    CODES,
    IDS,
    LENGTH,
    LOGITS,
    STEP,
    TEXT,
    TOKENS,
    WAVEFORM,
    Codes,
    SpeechPlan,
    Template,
)

_CODE = "code_"
_OF_CODES = "depth_decoder_"  # how the settings of the second model begin
_CHOOSING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
_MOST_FRAMES, _MOST_CHECKED = 125, 16
_FIRST_SPEAKER = "0"


class Csm(SpeechFamily):
    """`input_ids -> ...`, `codes -> (logits, code cache, KV cache)`, `code -> (logits, code cache)`, `codes -> waveform`."""

    kind = TO_WAVEFORM

    @property
    def vocabulary(self) -> int:
        """See `SpeechFamily.vocabulary`."""
        return int(self.config.text_vocab_size)

    @property
    def plan(self) -> SpeechPlan:
        """See `SpeechFamily.plan`."""
        self.refuse_vocoder()
        config, said = self.config, self.settings
        of_codes = {name.removeprefix(_OF_CODES): said[name] for name in said if name.startswith(_OF_CODES)}
        return SpeechPlan(
            sampling_rate=int(config.codec_config.sampling_rate),
            codes=Codes(
                count=config.num_codebooks,
                end=config.codebook_eos_token_id,
                most_steps=int(said.get("max_new_tokens", _MOST_FRAMES)),
                first=_choosing(said),
                others=_choosing(of_codes),
            ),
            most_tokens=config.max_position_embeddings,
            template=Template(_FIRST_SPEAKER, numbered=True),
        )

    def parts(self, network: Any) -> tuple[SpeechPart, ...]:
        """See `SpeechFamily.parts`."""
        config = self.config
        depth = config.depth_decoder_config
        states = cache_states(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        code_states = cache_states(depth.num_hidden_layers, depth.num_key_value_heads, depth.head_dim, _CODE)
        cache, code_cache = inputs_of(states), inputs_of(code_states)
        said = (LOGITS, *code_cache)
        return (
            SpeechPart(
                TEXT, CsmText(network), {IDS: (1, TOKENS)}, (*said, *cache), handed=handed_over(states + code_states)
            ),
            SpeechPart(
                STEP,
                CsmStep(network),
                {CODES: (1, 1, config.num_codebooks), **cache},
                (*said, *(state.output_name for state in states)),
                states=states,
                handed=handed_over(code_states),
            ),
            SpeechPart(
                CODE,
                CsmCode(network),
                {CODE: (1, 1), **code_cache},
                (LOGITS, *(state.output_name for state in code_states)),
                states=code_states,
            ),
            SpeechPart(WAVEFORM, CsmCodec(network), {CODES: (1, LENGTH, config.num_codebooks)}, (WAVEFORM,)),
        )

    def spoken(self, model: Any, ids: torch.Tensor, speaker: torch.Tensor | None, draws: Draws) -> Utterance:
        """See `SpeechFamily.spoken`; the likeliest codes, so that nothing is drawn."""
        codes = self.plan.codes
        with _recorded(model) as record:
            made = model.generate(
                ids,
                do_sample=False,
                depth_decoder_do_sample=False,
                max_new_tokens=min(codes.most_steps if codes is not None else 0, _MOST_CHECKED),
                output_logits=True,
                return_dict_in_generate=True,
                output_audio=True,
            )
        waveform, frames = made.audio[0][None], made.sequences
        if (frames[0, -1] == self.config.codebook_eos_token_id).all():
            frames = frames[:, :-1]  # the frame that ends the speech is not heard
        others = torch.cat(record.logits, dim=1).unflatten(1, (-1, self.config.num_codebooks - 1))
        logits = torch.cat([torch.stack(made.logits, dim=1)[:, :, None], others], dim=2)[0, : frames.shape[1]]
        answer = {LOGITS: logits.flatten(0, 1), CODES: frames, WAVEFORM: waveform}
        made_of = {name: tensor.numpy() for name, tensor in answer.items()}
        return Utterance(made_of, largest_in((made.cache, *record.caches)))


def _choosing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what settings say of how a code is chosen."""
    return {name: settings[name] for name in _CHOOSING if name in settings}


def _first_code(network: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the logits [1, V] of a frame's first code, and the caches of the others after the hidden state [1, D]."""
    depth = network.depth_decoder
    cache = filled_cache(depth.config)
    placeholder = torch.zeros((1, 1), dtype=torch.int64, device=hidden.device)
    depth.model(input_ids=placeholder, backbone_last_hidden_state=hidden, cache=cache, use_cache=True)
    return network.lm_head(hidden), *cache.states().values()


class CsmText(nn.Module):
    """Reads a text."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits [1, V] of the first code, the code cache, and the KV cache, for ids i64 [1, S]."""
        network = self.network
        cache = filled_cache(network.config)
        embeds = network.embed_text_tokens(input_ids)
        hidden = network.backbone_model(inputs_embeds=embeds, cache=cache, use_cache=True).last_hidden_state[:, -1]
        return *_first_code(network, hidden), *cache.states().values()


class CsmStep(nn.Module):
    """Reads a frame."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, codes: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits [1, V] of the next frame's first code, its code cache, and the KV cache.

        Args:
            codes: i64 [1, 1, K].
            states: keys and values [1, H, P, D] of each layer.
        """
        network, cache = self.network, filled_cache(self.network.config, states)
        hidden = network.backbone_model(input_ids=codes, cache=cache, use_cache=True).last_hidden_state[:, -1]
        return *_first_code(network, hidden), *cache.states().values()


class CsmCode(nn.Module):
    """Reads a code."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, code: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits [1, V] of the next code, and the code cache.

        Args:
            code: i64 [1, 1]; which of a frame it is follows from the cache.
            states: keys and values [1, H, P, D] of each layer.
        """
        depth = self.network.depth_decoder
        cache = filled_cache(depth.config, states)
        made = depth(input_ids=code, cache=cache, use_cache=True, logits_to_keep=1)
        return made.logits[:, -1], *cache.states().values()


class CsmCodec(nn.Module):
    """Makes a waveform of codes."""

    def __init__(self, network: Any) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return samples [1, N] of frames i64 [1, F, K]."""
        sound: torch.Tensor = self.network.codec_model.decode(codes.transpose(1, 2)).audio_values[:, 0]
        return sound


class _Record:
    """What the second model makes while a model speaks."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.caches: list[Any] = []


@contextmanager
def _recorded(model: Any) -> Iterator[_Record]:
    """Record the logits [1, 1, V] of all codes but the first ones, and the caches of frames, for the length of the block."""
    record = _Record()

    def decoded(_module: nn.Module, _given: Any, made: Any) -> None:
        record.logits.append(made.logits[:, -1:])
        if not record.caches or record.caches[-1] is not made.cache:
            record.caches.append(made.cache)

    with ExitStack() as stack:
        stack.callback(model.depth_decoder.register_forward_hook(decoded).remove)
        yield record


__all__ = ["Csm", "CsmCode", "CsmCodec", "CsmStep", "CsmText"]

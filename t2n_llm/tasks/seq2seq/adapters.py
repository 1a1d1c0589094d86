"""Asking an encoder-decoder: how its encoder reads a source, and how its decoder takes tokens, where a family has its own way.

In: transformers' model and tensors by name. Out: what its encoder answered, hidden states [B, T, D] first; or its decoder's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch

from kvcache.compat import cache_keyword

COMPOSER = "composer"
"""An input of Pop2Piano's encoder, int64 [B]: the row of the table of arrangers that is read before the sound."""

_READ_ONCE = frozenset({"pixel_values", "flattened_patches", "input_features", "input_values", COMPOSER})


def read_source(network: Any, given: Mapping[str, torch.Tensor]) -> Any:
    """Return what a model's encoder makes of a source, asked as `generate()` asks it: without what concerns caches.

    Args:
        network: the whole model.
        given: a source by the names of its `SourceForm`, and its mask.
    """
    return _READERS.get(network.config.model_type, _read)(network, given)


def run_decoder(network: Any, read: Any, tokens: torch.Tensor, **options: Any) -> Any:
    """Return what a model's decoder makes of tokens: `logits` [B, S, vocab], and what else the class has.

    Args:
        network: the whole model.
        read: what its encoder answered.
        tokens: int64 [B, S].
        options: further arguments of the model's forward: `cache`, whatever the forward calls it, the source's mask.
    """
    return _DECODERS.get(network.config.model_type, _decode)(network, read, tokens, options)


def as_read(answer: type, hidden: torch.Tensor) -> Any:
    """Return hidden states [B, T, D] as an encoder answers; PP-FormulaNet's decoder reads what its encoder calls pooled.

    Args:
        answer: the dataclass of transformers in which it does.
        hidden: the states.
    """
    known = {field.name for field in fields(answer)}
    return answer(**{name: hidden for name in ("last_hidden_state", "pooler_output") if name in known})


def _read(network: Any, given: Mapping[str, torch.Tensor]) -> Any:
    """The encoder may know the source by another name than the model."""
    encoder = network.get_encoder()
    taken = signature(encoder.forward).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    named = {name: value for name, value in given.items() if name in taken or open_ended}
    if len(named) < len(given) and network.main_input_name not in named:
        named = {encoder.main_input_name: given[network.main_input_name], **named}
    return encoder(**named, return_dict=True)


def _read_image_then_text(network: Any, given: Mapping[str, torch.Tensor]) -> Any:
    """Florence-2: the rows of an image, then those of a prompt, as its processor puts placeholders before the prompt."""
    image = network.get_image_features(given["pixel_values"], return_dict=True).pooler_output
    text = network.get_input_embeddings()(given["input_ids"])
    return network.get_encoder()(inputs_embeds=torch.cat((image.to(text.dtype), text), dim=1), return_dict=True)


def _read_arranged(network: Any, given: Mapping[str, torch.Tensor]) -> Any:
    """Pop2Piano: the arranger's row, then frames of sound."""
    frames = network.mel_conditioner(feature=given["input_features"], index_value=given[COMPOSER], embedding_offset=0)
    return network.encoder(inputs_embeds=frames, return_dict=True)


def _read_pixels(network: Any, given: Mapping[str, torch.Tensor]) -> Any:
    """BLIP: the whole of what is seen is its vision model."""
    return network.vision_model(given["pixel_values"], return_dict=True)


def _read_projected(network: Any, given: Mapping[str, torch.Tensor]) -> Any:
    """GIT: what is seen, in rows as wide as a word's, before any layer of the decoder."""
    from transformers.modeling_outputs import BaseModelOutput

    seen = network.git.image_encoder(given["pixel_values"], return_dict=True).last_hidden_state
    return BaseModelOutput(last_hidden_state=network.git.visual_projection(seen))


def _decode(network: Any, read: Any, tokens: torch.Tensor, options: Mapping[str, Any]) -> Any:
    """Some classes look at a text that was read once more, and some refuse an image beside what was read of it."""
    asked = _as_named(network, {name: value for name, value in options.items() if name not in _READ_ONCE})
    return network(encoder_outputs=read, decoder_input_ids=tokens, return_dict=True, **asked)


def _as_named(module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the cache under the name that a module's forward has for it."""
    return {cache_keyword(module.forward) if name == "cache" else name: value for name, value in options.items()}


def _decode_beside(network: Any, read: Any, tokens: torch.Tensor, options: Mapping[str, Any]) -> Any:
    """BLIP: a decoder of its own class, which is told what was seen."""
    decoder = network.text_decoder
    caching = _as_named(decoder, {name: options[name] for name in ("cache", "use_cache") if name in options})
    return decoder(input_ids=tokens, encoder_hidden_states=read[0], return_dict=True, **caching)


@dataclass(frozen=True)
class _AfterSource:
    """A cache of two parts as one, for a decoder whose self-attention reads the source before the text.

    Attributes:
        source, text: transformers' caches; the first is full.
    """

    source: Any
    text: Any

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what new tokens [B, H, S, D] say, and return what all before them say too, [B, H, T + P + S, D]."""
        said = self.source.layers[layer]
        key, value = self.text.update(key, value, layer)
        return torch.cat((said.keys, key), dim=2), torch.cat((said.values, value), dim=2)


def _decode_after_image(network: Any, read: Any, tokens: torch.Tensor, options: Mapping[str, Any]) -> Any:
    """GIT: a decoder without cross-attention; rows of an image see each other, and tokens see them and the tokens before."""
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutput

    caches, encoder = options.get("cache"), network.git.encoder
    source, text = (DynamicCache(), DynamicCache()) if caches is None else _two_caches(caches)
    if not source.layers:
        encoder(read[0], use_cache=True, **_as_named(encoder, {"cache": source}))
    before, steps = text.get_seq_length(), tokens.shape[1]
    places = torch.arange(steps, device=tokens.device)[:, None] + before
    hidden_from = torch.arange(before + steps, device=tokens.device)[None] > places
    embedded = network.git.embeddings(input_ids=tokens, position_ids=places.T)
    least = torch.finfo(embedded.dtype).min
    causal = torch.zeros(hidden_from.shape, dtype=embedded.dtype, device=tokens.device).masked_fill(hidden_from, least)
    mask = torch.cat((causal.new_zeros((steps, read[0].shape[1])), causal), dim=1)[None, None]
    both = _as_named(encoder, {"cache": _AfterSource(source, text)})
    states = encoder(embedded, attention_mask=mask, **both)
    return CausalLMOutput(logits=network.output(states.last_hidden_state))


def _two_caches(caches: Any) -> tuple[Any, Any]:
    return caches.cross_attention_cache, caches.self_attention_cache


_Reader = Callable[[Any, Mapping[str, torch.Tensor]], Any]
_Decoder = Callable[[Any, Any, torch.Tensor, Mapping[str, Any]], Any]
_READERS: Mapping[str, _Reader] = {
    "blip": _read_pixels,
    "florence2": _read_image_then_text,
    "git": _read_projected,
    "pop2piano": _read_arranged,
}
_DECODERS: Mapping[str, _Decoder] = {"blip": _decode_beside, "git": _decode_after_image}


__all__ = ["COMPOSER", "as_read", "read_source", "run_decoder"]

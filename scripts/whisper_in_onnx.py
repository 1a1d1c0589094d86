"""Whisper in ONNX Runtime, for scripts/bench_seq2seq.py: what it decodes with, exported by torch.onnx in f32.

The encoder gives the keys and values of the source, once; the decoder takes them and its own cache, as the archives for tract do.
Needs the packages onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache

from kvcache.compat import cache_keyword

_PAST = 3  # positions to trace with


class Encoder(torch.nn.Module):
    """`input_features -> (key, value, ...)` of every layer's cross-attention, [B, H, T, D]."""

    def __init__(self, model: Any) -> None:
        """Wrap transformers' model."""
        super().__init__()
        self.model = model

    def forward(self, input_features: torch.Tensor) -> list[torch.Tensor]:
        """Return keys and values in turn, layer by layer, of features f32 [B, mel, frames]."""
        hidden = self.model.model.encoder(input_features).last_hidden_state
        heads = self.model.config.decoder_attention_heads
        shape = (hidden.shape[0], hidden.shape[1], heads, hidden.shape[2] // heads)
        attention = [layer.encoder_attn for layer in self.model.model.decoder.layers]
        pairs = [(each.k_proj(hidden), each.v_proj(hidden)) for each in attention]
        return [projected.view(shape).transpose(1, 2) for pair in pairs for projected in pair]


class Decoder(torch.nn.Module):
    """`(input_ids, *past, *cross) -> (logits, *present)`."""

    def __init__(self, model: Any) -> None:
        """Wrap transformers' model."""
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, past: list[torch.Tensor], cross: list[torch.Tensor]) -> Any:
        """Return the last position's logits f32 [B, 1, vocab], and keys and values [B, H, P + S, D] in turn."""
        layers = self.model.config.decoder_layers
        own, told = DynamicCache(), DynamicCache()
        for layer in range(layers):
            own.update(past[2 * layer], past[2 * layer + 1], layer)
            told.update(cross[2 * layer], cross[2 * layer + 1], layer)
        cache = EncoderDecoderCache(own, told)
        cache.is_updated = dict.fromkeys(range(layers), True)
        states = cross[0].transpose(1, 2).flatten(2)  # of the right length; its values are not read
        told_by = {cache_keyword(self.model.model.decoder.forward): cache}
        result = self.model.model.decoder(input_ids, encoder_hidden_states=states, **told_by)
        kept = [part for layer in own.layers for part in (layer.keys, layer.values)]
        return self.model.proj_out(result.last_hidden_state[:, -1:]), kept


def in_onnx_runtime(
    model: Any, features: np.ndarray, prompt: Sequence[int], tokens: int, folder: Path
) -> Callable[[], None]:
    """Export encoder and decoder, and return what decodes with them on one thread.

    Args:
        model: transformers' Whisper, f32.
        features: f32 [1, mel, frames].
        prompt: what the decoder begins with.
        tokens: how many to decode, greedy.
        folder: where the files may lie.
    """
    tensors, states = 2 * model.config.decoder_layers, _states(model, _PAST)
    names = ["input_ids", *(f"past_{at}" for at in range(tensors)), *(f"cross_{at}" for at in range(tensors))]
    said = _states(model, model.config.max_source_positions)
    symbols: tuple[Any, ...] = ({1: Dim("S", min=2, max=64)}, [{2: Dim("P", max=400)}] * tensors, [{}] * tensors)
    with torch.no_grad():
        torch.onnx.export(Encoder(model).eval(), (torch.from_numpy(features),), folder / "encoder.onnx", dynamo=True)
        torch.onnx.export(
            Decoder(model).eval(),
            (torch.tensor([[*prompt, *prompt]]), states, said),
            folder / "decoder.onnx",
            input_names=names,
            dynamic_shapes=symbols,
            dynamo=True,
        )
    encoder, decoder = _opened(folder / "encoder.onnx"), _opened(folder / "decoder.onnx")
    heard, empty = encoder.get_inputs()[0].name, [state.numpy()[:, :, :0] for state in states]

    def decode() -> None:
        told, past, pending = encoder.run(None, {heard: features}), empty, list(prompt)
        for _ in range(tokens):
            ids = np.array([pending], np.int64)
            logits, *past = decoder.run(None, dict(zip(names, [ids, *past, *told], strict=True)))
            pending = [int(logits[0, -1].argmax())]

    return decode


def _states(model: Any, length: int) -> list[torch.Tensor]:
    """Return keys and values [1, H, length, D] of every layer, all zero."""
    heads = model.config.decoder_attention_heads
    return [
        torch.zeros(1, heads, length, model.config.d_model // heads) for _ in range(2 * model.config.decoder_layers)
    ]


def _opened(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

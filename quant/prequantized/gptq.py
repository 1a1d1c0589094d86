"""GPTQ checkpoints (AutoGPTQ, GPTQModel): `qweight`, `qzeros`, `scales`, `g_idx` of each layer.

In: the quantization config and the tensors. Out: weights [N, K]. Format: qweight int32 [K * bits / 32, N], packed along K;
qzeros int32 [G, N * bits / 32], one less than the zero point unless the format is `gptq_v2`; scales float [G, N];
g_idx int32 [K], the group of each input (AutoGPTQ `qlinear_cuda.py`; GPTQModel documentation of `checkpoint_format`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from generic_export.errors import WeightError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor
from quant.prequantized.grouped import WORD_BITS, GroupedWeight, check_bits, unpack_words
from quant.prequantized.tensors import Decoding, Layers

_FORMATS = {"gptq": 1, "gptq_v2": 0}


def decode_gptq(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a GPTQ checkpoint with plain weights.

    Args:
        config: `quantization_config` of config.json: `bits`, `checkpoint_format`.
        tensors: by name.

    Raises:
        WeightError: the width or the checkpoint format is not supported.
        MissingTensorError: a part of a layer is not there.
    """
    bits = check_bits(config.get("bits"), "gptq")
    form = config.get("checkpoint_format") or "gptq"
    if form not in _FORMATS:
        raise WeightError(
            f"gptq: checkpoint format {form!r} cannot be read.", f"Known: {', '.join(_FORMATS)}; convert it to one."
        )
    layers = Layers(tensors)
    for path in layers.with_suffix(".qweight"):
        layers.add(*_weight(path, layers, bits, _FORMATS[form]).source())
    return layers.decoding("gptq")


def _weight(path: str, layers: Layers, bits: int, offset: int) -> GroupedWeight:
    words, scales = layers.need(f"{path}.qweight"), layers.need(f"{path}.scales")
    zeros, g_idx = layers.need(f"{path}.qzeros"), layers.get(f"{path}.g_idx")
    inputs, outputs = words.shape[0] * WORD_BITS // bits, words.shape[1]

    def read_zeros() -> torch.Tensor:
        # The largest level of v1 files stands for zero point 2^bits, so the sum must not wrap at the level's width.
        return (unpack_words(read_tensor(zeros), bits, dim=1).to(torch.int16) + offset).T

    return GroupedWeight(
        f"{path}.weight",
        (outputs, inputs),
        bits,
        scales=lambda: read_tensor(scales).T,
        zeros=read_zeros,
        levels=lambda: _columns(read_tensor(words), bits),
        group_of=None if g_idx is None else read_tensor(g_idx).to(torch.int64),
    )


def _columns(words: torch.Tensor, bits: int) -> Callable[[slice], torch.Tensor]:
    return lambda rows: unpack_words(words[:, rows], bits, dim=0).T.contiguous()

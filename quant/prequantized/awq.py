"""AWQ checkpoints (AutoAWQ, version GEMM): `qweight`, `qzeros`, `scales` of each layer.

In: the quantization config and the tensors. Out: weights [N, K]. Format: qweight int32 [K, N / 8] and qzeros int32
[G, N / 8], packed along N; the fields of a word, lowest bits first, are columns 0, 2, 4, 6, 1, 3, 5, 7; scales float [G, N]
(AutoAWQ `awq/modules/linear/gemm.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from generic_export.errors import WeightError
from generic_export.weights.source import TensorSource
from generic_export.weights.values import read_tensor
from quant.prequantized.grouped import GroupedWeight, unpack_words
from quant.prequantized.tensors import Decoding, Layers

_BITS = 4
_FIELDS = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def decode_awq(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return an AWQ checkpoint with plain weights.

    Args:
        config: `quantization_config` of config.json: `bits`, `version`.
        tensors: by name.

    Raises:
        WeightError: the weights have not 4 bits, or another layout than GEMM's.
        MissingTensorError: a part of a layer is not there.
    """
    bits = config.get("bits", config.get("w_bit", _BITS))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != _BITS or version != "gemm":
        raise WeightError(
            f"awq: {bits}-bit weights in the layout {version!r} cannot be read.",
            "4 bits in the layout 'gemm' can; else give the original checkpoint.",
        )
    layers = Layers(tensors)
    for path in layers.with_suffix(".qweight"):
        layers.add(*_weight(path, layers).source())
    return layers.decoding("awq")


def _weight(path: str, layers: Layers) -> GroupedWeight:
    words, scales = layers.need(f"{path}.qweight"), layers.need(f"{path}.scales")
    zeros = layers.get(f"{path}.qzeros")  # absent where no zero point is used
    return GroupedWeight(
        f"{path}.weight",
        (words.shape[1] * _FIELDS, words.shape[0]),
        _BITS,
        scales=lambda: read_tensor(scales).T,
        zeros=None if zeros is None else lambda: unpack_words(read_tensor(zeros), _BITS, 1, _ORDER).T,
        levels=lambda: _columns(read_tensor(words)),
    )


def _columns(words: torch.Tensor) -> Callable[[slice], torch.Tensor]:
    def read(rows: slice) -> torch.Tensor:
        first, last = rows.start // _FIELDS, -(-rows.stop // _FIELDS)
        columns = unpack_words(words[:, first:last], _BITS, 1, _ORDER)
        return columns[:, rows.start - first * _FIELDS : rows.stop - first * _FIELDS].T.contiguous()

    return read

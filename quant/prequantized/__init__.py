"""Checkpoints that are quantised already: read as plain weights, with their very blocks where Q4_0 can hold them.

In: the quantization config of a checkpoint and its tensors. Out: `Decoding`: weights under their plain names, and notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from generic_export.errors import WeightError
from generic_export.weights.source import TensorSource
from quant.prequantized.awq import decode_awq
from quant.prequantized.bitsandbytes import decode_bitsandbytes
from quant.prequantized.compressed_tensors import decode_compressed_tensors
from quant.prequantized.float8 import decode_float8
from quant.prequantized.gguf import GgufFile, GgufTensor, joined, open_gguf
from quant.prequantized.gptq import decode_gptq
from quant.prequantized.hqq import decode_hqq
from quant.prequantized.modelopt import decode_modelopt
from quant.prequantized.mxfp4 import decode_mxfp4
from quant.prequantized.tensors import DecodedTensor, Decoding, ExactTensor, StoredQ4

METHODS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, TensorSource]], Decoding]] = {
    "gptq": decode_gptq,
    "awq": decode_awq,
    "compressed-tensors": decode_compressed_tensors,
    "fp8": decode_float8,
    "fbgemm_fp8": decode_float8,
    "mxfp4": decode_mxfp4,
    "bitsandbytes": decode_bitsandbytes,
    "hqq": decode_hqq,
    "modelopt": decode_modelopt,
}
"""`quant_method` of a quantization config -> its decoder."""


def decode_checkpoint(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return the tensors of a quantised checkpoint as those of one that is not.

    Args:
        config: `quantization_config` of config.json.
        tensors: by name in the checkpoint.

    Raises:
        WeightError: the method, or its variant, is not supported.
        MissingTensorError, CorruptCheckpointError: parts are missing or do not fit together.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise WeightError(
            f"the checkpoint is quantized with {method!r}, which is not supported.",
            f"Supported: {', '.join(METHODS)} and GGUF files; otherwise use the original checkpoint.",
        )
    return METHODS[method](config, tensors)


__all__ = [
    "METHODS",
    "DecodedTensor",
    "Decoding",
    "ExactTensor",
    "GgufFile",
    "GgufTensor",
    "StoredQ4",
    "decode_checkpoint",
    "joined",
    "open_gguf",
]

"""Checkpoints of NVIDIA's ModelOpt: NVFP4 and float8 layers, in one algorithm or mixed.

In: the quantization config and the tensors. Out: weights in float32. A layer is what its tensors are: `weight` uint8 with
`weight_scale` and `weight_scale_2` is NVFP4, with `pre_quant_scale` where AWQ scaled its input; `weight` float8 with
`weight_scale` is float8 of a tensor or a row. Experts in one tensor have `NAME`, `NAME_weight_scale` and `NAME_weight_scale_2`
(ModelOpt `modelopt/torch/export/quant_utils.py`; `hf_quant_config.json` of published checkpoints).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from generic_export.errors import WeightError
from generic_export.weights.source import TensorSource
from quant.prequantized.float8 import add_float8
from quant.prequantized.nvfp4 import REASON, nvfp4_weight
from quant.prequantized.tensors import Decoding, Layers

_ALGORITHMS = (
    *("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8"),
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
)
_MIXED = "MIXED_PRECISION"
# Of activations and of the cache of keys and values.
_NOT_WEIGHTS = (
    *(".input_scale", ".output_scale", "_input_scale", ".k_scale", ".v_scale"),
    *(".k_proj.k_bias", ".v_proj.v_bias"),
)


def decode_modelopt(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> Decoding:
    """Return a checkpoint of ModelOpt with plain weights.

    Args:
        config: `quantization_config` of config.json, or `quantization` of hf_quant_config.json: `quant_algo`,
            `quantized_layers` where it is mixed.
        tensors: by name.

    Raises:
        WeightError: an algorithm is not known, or a scale does not fit.
        MissingTensorError: a scale is not there.
        CorruptCheckpointError: shapes do not go together.
    """
    for algorithm in _algorithms(config):
        if algorithm not in _ALGORITHMS:
            raise WeightError(
                f"ModelOpt: quant_algo {algorithm!r} is not supported.",
                f"Supported: {', '.join(_ALGORITHMS)}, and {_MIXED} of these; otherwise use the original checkpoint.",
            )
    layers = Layers(tensors)
    for path in layers.with_suffix(".weight_scale_2"):
        packed, scales = layers.need(f"{path}.weight"), layers.need(f"{path}.weight_scale")
        inputs = layers.get(f"{path}.pre_quant_scale")
        layers.add(
            nvfp4_weight(f"{path}.weight", packed, scales, layers.need(f"{path}.weight_scale_2"), inputs=inputs), REASON
        )
    for name in layers.with_suffix("_weight_scale_2"):
        packed, scales = layers.need(name), layers.need(f"{name}_weight_scale")
        layers.add(nvfp4_weight(name, packed, scales, layers.need(f"{name}_weight_scale_2")), REASON)
    add_float8(layers, tensors)
    for ending in _NOT_WEIGHTS:
        for path in layers.with_suffix(ending):
            layers.drop(path + ending)
    return layers.decoding("modelopt")


def _algorithms(config: Mapping[str, Any]) -> list[str]:
    """Return the algorithms of a config: one, or those of its layers."""
    algorithm = str(config.get("quant_algo")).upper()
    layers = config.get("quantized_layers")
    if algorithm != _MIXED or not isinstance(layers, Mapping):
        return [algorithm]
    named = (layer.get("quant_algo") for layer in layers.values() if isinstance(layer, Mapping))
    return sorted({str(each).upper() for each in named})

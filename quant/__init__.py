"""Choosing how tensor values are stored: half precision casts, block quantisation and recipes.

In: `TensorSource` objects as a checkpoint stores them. Out: `TensorSource` objects as the archive stores them.
"""

from generic_export.weights.half import CastReport, CastTensor, OverflowCount, cast_tensor
from quant.blocks import Q4Blocks
from quant.protocol import InputStatistics, Quantizer
from quant.stream import QuantizationReport, QuantizedTensor
from quant.tensor import QTensor

__all__ = [
    "CastReport",
    "CastTensor",
    "InputStatistics",
    "OverflowCount",
    "Q4Blocks",
    "QTensor",
    "QuantizationReport",
    "QuantizedTensor",
    "Quantizer",
    "cast_tensor",
]

"""Choosing how tensor values are stored: half precision casts, block quantisation and recipes.

In: `TensorSource` objects as a checkpoint stores them. Out: `TensorSource` objects as the archive stores them.
"""

from quant.half import CastReport, CastTensor, OverflowCount, cast_tensor

__all__ = ["CastReport", "CastTensor", "OverflowCount", "cast_tensor"]

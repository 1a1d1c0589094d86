"""Casting between float widths chunk by chunk, without a silent infinity.

In: a `TensorSource` of float16, bfloat16, float32 or float64. Out: a `TensorSource` of float16, float32 or float64.
Values too large for the new dtype are saturated and counted in a `CastReport`; true inf and nan stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from generic_export.errors import WeightError
from generic_export.weights.source import CHUNK_BYTES, DerivedTensor, TensorSource
from generic_export.weights.values import value_pieces

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TARGET_DTYPES = (torch.float16, torch.float32, torch.float64)
_NUMPY_DTYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}

# Target dtype -> (signed view, unsigned view, bits of +inf, bits of -inf). Bit patterns of floats order like
# integers, so one integer maximum per sign tells whether a chunk holds any inf or nan.
_INFINITY_BITS = {
    torch.float16: (np.int16, np.uint16, 0x7C00, 0xFC00),
    torch.float32: (np.int32, np.uint32, 0x7F80_0000, 0xFF80_0000),
}


@dataclass(frozen=True)
class OverflowCount:
    """How much of one tensor did not fit the new dtype.

    Args:
        count: values that were saturated.
        max_abs: the largest of their magnitudes before the cast.
    """

    count: int
    max_abs: float


@dataclass
class CastReport:
    """Collects what casts changed, over all tensors of an export: tensor name -> overflow."""

    overflows: dict[str, OverflowCount] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CastTensor(DerivedTensor):
    """A tensor source that casts another one while it streams; values round to nearest even, as `Tensor.to`.

    A finite value that would become inf (beyond 65504 in float16, once rounded) becomes the largest finite value of
    its sign, and is counted in `report` under the tensor's name. Streaming twice does not count twice.

    Args:
        source: where the values come from; its dtype is one of `SOURCE_DTYPES`.
        dtype: one of `TARGET_DTYPES`.
        report: where overflows are recorded, while `chunks()` is consumed.

    Raises:
        WeightError: one of the dtypes is not such a float.
    """

    source: TensorSource
    dtype: torch.dtype
    report: CastReport

    def __post_init__(self) -> None:
        if self.source.dtype not in SOURCE_DTYPES or self.dtype not in TARGET_DTYPES:
            raise WeightError(
                f"tensor {self.name}: no cast from {_short(self.source.dtype)} to {_short(self.dtype)}.",
                f"Casts go from {', '.join(map(_short, SOURCE_DTYPES))} to {', '.join(map(_short, TARGET_DTYPES))}.",
            )

    def chunks(self) -> Iterator[memoryview]:
        """The cast bytes; raises whatever the source raises."""
        self.report.overflows.pop(self.name, None)
        step = CHUNK_BYTES // self.dtype.itemsize
        for values in value_pieces(self.source):
            for start in range(0, len(values), step):
                yield self._cast(values[start : start + step]).view(torch.uint8).numpy().data

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        # copy_ into a fresh tensor converts bf16 to f16 several times faster than Tensor.to on one thread; and its memory is
        # NumPy's, as that of the chunks that are read: without alignment, so that each takes the place of the one before.
        cast = torch.from_numpy(np.empty(values.shape, _NUMPY_DTYPES[self.dtype])).copy_(values)
        if self.source.dtype != self.dtype and _holds_inf_or_nan(cast):
            self._saturate(cast, values)
        return cast

    def _saturate(self, cast: torch.Tensor, values: torch.Tensor) -> None:
        """Replace, in place, the infinities that the cast made; the slow path, rarely taken."""
        overflowed = cast.isinf() & values.isfinite()
        originals = values[overflowed]
        if not len(originals):
            return
        limit = torch.finfo(self.dtype).max
        cast[overflowed] = originals.sign().to(self.dtype) * limit
        before = self.report.overflows.get(self.name, OverflowCount(0, 0.0))
        max_abs = max(before.max_abs, originals.abs().max().item())
        self.report.overflows[self.name] = OverflowCount(before.count + len(originals), max_abs)


def cast_tensor(source: TensorSource, dtype: torch.dtype, report: CastReport) -> TensorSource:
    """`source` as `dtype`: a `CastTensor`, or `source` itself when it has that dtype already.

    Args:
        source: where the values come from.
        dtype: the dtype wanted.
        report: where overflows are recorded while the result is streamed.

    Raises:
        WeightError: there is no such cast (integers, bool, 8-bit floats).
    """
    return source if source.dtype == dtype else CastTensor(source, dtype, report)


def _holds_inf_or_nan(values: torch.Tensor) -> bool:
    if values.dtype not in _INFINITY_BITS or not values.numel():
        return False
    signed, unsigned, positive, negative = _INFINITY_BITS[values.dtype]
    bits = values.numpy()
    return bool(bits.view(signed).max() >= positive or bits.view(unsigned).max() >= negative)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

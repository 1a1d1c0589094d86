"""Casting between float widths chunk by chunk, without a silent infinity.

In: a `TensorSource` of float16, bfloat16, float32 or float64. Out: a `TensorSource` of float16, float32 or float64.
Values too large for the new dtype are saturated, those too small for it become zero: both are counted in a `CastReport`, as are
true inf and nan, which stay or are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from generic_export.errors import NonFiniteWeightError, WeightError
from generic_export.weights.source import CHUNK_BYTES, DerivedTensor, TensorSource
from generic_export.weights.values import value_pieces

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TARGET_DTYPES = (torch.float16, torch.float32, torch.float64)
_NUMPY_DTYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}

_LOOK_VALUES = (
    1 << 18
)  # looked at together: they stay in a core's cache, and a rare value costs a second look at no more

# Target dtype -> (signed view, unsigned view, bits of +inf, bits of -inf). Bit patterns of floats order like
# integers, so one integer maximum per sign tells whether a chunk holds any inf or nan.
_INFINITY_BITS: dict[torch.dtype, tuple[Any, Any, int, int]] = {
    torch.float16: (np.int16, np.uint16, 0x7C00, 0xFC00),
    torch.float32: (np.int32, np.uint32, 0x7F80_0000, 0xFF80_0000),
    torch.float64: (np.int64, np.uint64, 0x7FF0_0000_0000_0000, 0xFFF0_0000_0000_0000),
}
_MAGNITUDE = 0x7FFF  # float16 without its sign


@dataclass(frozen=True)
class OverflowCount:
    """Values of one tensor that exceeded the range of the new dtype.

    Args:
        count: number of saturated values.
        max_abs: largest magnitude among them, before the cast.
    """

    count: int
    max_abs: float


@dataclass(frozen=True)
class NonFiniteCount:
    """The values of one tensor that are no numbers, or infinite, in the source.

    Args:
        nan, inf: how many of each.
        first: index of the first of them.
    """

    nan: int
    inf: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        kinds = [f"{count} {kind}" for count, kind in ((self.nan, "NaN"), (self.inf, "infinite")) if count]
        return f"{' and '.join(kinds)} value{'s' * (self.nan + self.inf > 1)}, the first at {list(self.first)}"


@dataclass(frozen=True)
class FlushedCount:
    """How much of one tensor is too small for float16, and became zero.

    Args:
        count: values that were not zero before.
        values: of the whole tensor.
        max_abs: the largest of their magnitudes before the cast.
    """

    count: int
    values: int
    max_abs: float


@dataclass
class CastReport:
    """Collects which values casts changed, for all tensors of an export, by tensor name.

    Args:
        overflows: finite values that were saturated.
        nonfinite: infinities and NaNs in the source.
        flushed: values that became zero.
        refuses_nonfinite: raise after streaming a tensor that contains inf or NaN.
    """

    overflows: dict[str, OverflowCount] = field(default_factory=dict)
    nonfinite: dict[str, NonFiniteCount] = field(default_factory=dict)
    flushed: dict[str, FlushedCount] = field(default_factory=dict)
    refuses_nonfinite: bool = False

    def forget(self, name: str) -> None:
        """Remove the record of a tensor that is streamed again.

        Args:
            name: name of the tensor.
        """
        for counts in (self.overflows, self.nonfinite, self.flushed):
            counts.pop(name, None)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class CastTensor(DerivedTensor):
    """A tensor source that casts another one while it streams. Values are rounded to nearest even, as `Tensor.to` does.

    A finite value that would become inf (beyond 65504 in float16, after rounding) becomes the largest finite value of its
    sign. `report` counts these values, values that float16 rounds to zero, and non-finite values of the source, by the tensor's
    name. Streaming twice does not count twice. Sources that already have the dtype are inspected too.

    Args:
        source: source of the values; its dtype is one of `SOURCE_DTYPES`.
        dtype: one of `TARGET_DTYPES`.
        report: receives the counts while `chunks()` is consumed.

    Raises:
        WeightError: one of the dtypes is not supported.
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
        """Yield the cast bytes; raises whatever the source raises.

        Raises:
            NonFiniteWeightError: the source contains inf or NaN and the report refuses them. All bytes were yielded by then.
        """
        self.report.forget(self.name)
        step, done = CHUNK_BYTES // self.dtype.itemsize, 0
        for values in value_pieces(self.source):
            for start in range(0, len(values), step):
                piece = values[start : start + step]
                cast = self._cast(piece)
                self._look(cast, piece, done)
                done += len(piece)
                yield cast.view(torch.uint8).numpy().data
        found = self.report.nonfinite.get(self.name)
        if found is not None and self.report.refuses_nonfinite:
            raise NonFiniteWeightError(
                f"tensor {self.name}: {found}.",
                "A model that was trained has none: correct the checkpoint, or pass --allow-nonfinite to export it as it is.",
            )

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        if self.source.dtype == self.dtype:
            return values
        # copy_ into a fresh tensor converts bf16 to f16 several times faster than Tensor.to on one thread; and its memory is
        # NumPy's, as that of the chunks that are read: without alignment, so that each takes the place of the one before.
        return torch.from_numpy(np.empty(values.shape, _NUMPY_DTYPES[self.dtype])).copy_(values)

    def _look(self, cast: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Look at what a cast made; what is rare is looked at twice."""
        bits, narrows = cast.numpy(), self.dtype == torch.float16 != self.source.dtype
        magnitudes = np.empty(min(len(bits), _LOOK_VALUES), np.uint16) if narrows else None
        for first in range(0, len(bits), _LOOK_VALUES):
            piece = bits[first : first + _LOOK_VALUES]
            if magnitudes is None:
                suspicious = _holds_inf_or_nan(piece, self.dtype)
            else:
                magnitude = np.bitwise_and(piece.view(np.uint16), _MAGNITUDE, out=magnitudes[: len(piece)])
                suspicious = magnitude.max() >= _INFINITY_BITS[self.dtype][2]
                if len(zeros := _zeros(magnitude)):
                    self._count_flushed(values[first : first + len(piece)][torch.from_numpy(zeros)])
            if suspicious:
                end = first + len(piece)
                self._saturate(cast[first:end], values[first:end])
                self._count_nonfinite(values[first:end], start + first)

    def _count_nonfinite(self, values: torch.Tensor, start: int) -> None:
        nan, inf = values.isnan(), values.isinf()
        bad = (nan | inf).nonzero()
        if not len(bad):
            return
        before = self.report.nonfinite.get(self.name)
        first = tuple(int(each) for each in np.unravel_index(start + int(bad[0]), self.shape or (1,)))
        self.report.nonfinite[self.name] = NonFiniteCount(
            int(nan.sum()) + (before.nan if before else 0),
            int(inf.sum()) + (before.inf if before else 0),
            before.first if before else first[: len(self.shape)],
        )

    def _count_flushed(self, originals: torch.Tensor) -> None:
        """Count, of the values that became zero, those that were not."""
        count = int(originals.count_nonzero())
        if count:
            before = self.report.flushed.get(self.name, FlushedCount(0, 0, 0.0))
            max_abs = max(before.max_abs, originals.abs().max().item())
            self.report.flushed[self.name] = FlushedCount(before.count + count, math.prod(self.shape), max_abs)

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
    """Return `source` in another dtype: a `CastTensor`, or `source` itself if it has that dtype.

    Args:
        source: source of the values.
        dtype: the new dtype.
        report: receives the counts while the result is streamed.

    Raises:
        WeightError: there is no such cast (integers, bool, 8-bit floats).
    """
    return source if source.dtype == dtype else CastTensor(source, dtype, report)


def watched_tensor(source: TensorSource, dtype: torch.dtype, report: CastReport) -> TensorSource:
    """`source` as `dtype`, each float of it looked at while it streams, cast or not; integers and truth values as they are.

    Args, Raises: as `cast_tensor`.
    """
    return CastTensor(source, dtype, report) if source.dtype in SOURCE_DTYPES else cast_tensor(source, dtype, report)


def _holds_inf_or_nan(values: np.ndarray, dtype: torch.dtype) -> bool:
    signed, unsigned, positive, negative = _INFINITY_BITS[dtype]
    return bool(values.view(signed).max() >= positive or values.view(unsigned).max() >= negative)


def _zeros(magnitude: np.ndarray) -> np.ndarray:
    """Return where values are zero, int64. One pass tells that none is, which is the rule."""
    return np.empty(0, np.int64) if magnitude.min() else np.flatnonzero(magnitude == 0)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""How close is close: tract's own tolerance levels, and a record of where and how much two arrays differ.

In: what an engine answered and what PyTorch did. Out: `Comparison`, plain data that prints itself on one line.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from generic_export.errors import OptionError

# Upper bounds of the classes of absolute error; the last class is everything beyond.
ERROR_CLASSES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class ToleranceLimits:
    """Tolerance of a comparison: `|a - b| <= absolute + relative * |b| + of_largest * max|b|`.

    tract's command line has no option for `of_largest` and ignores it.

    Args:
        absolute: absolute tolerance.
        relative: tolerance relative to the reference value.
        outliers: share of elements, from 0 to 1, that may exceed the limit.
        of_largest: tolerance relative to the largest reference value.
    """

    absolute: float = 0.0
    relative: float = 0.0
    outliers: float = 0.0
    of_largest: float = 0.0

    def limits(self, dtype: np.dtype) -> ToleranceLimits:
        """Return these limits, which do not depend on the dtype.

        Args:
            dtype: dtype of the compared values; ignored.
        """
        return self

    def __str__(self) -> str:
        outliers = f", {self.outliers:.2%} of outliers" if self.outliers else ""
        largest = f", {self.of_largest:g} of the largest" if self.of_largest else ""
        return f"atol {self.absolute:g}, rtol {self.relative:g}{largest}{outliers}"


class TractCheckTolerance(enum.StrEnum):
    """Tolerance levels with the names of tract's command line. A member equals its name.

    Source: tract-data, `src/tensor.rs`, `Approximation`.
    """

    EXACT = "exact"
    CLOSE = "close"
    APPROXIMATE = "approximate"
    VERY = "very"
    SUPER = "super"
    ULTRA = "ultra"

    def limits(self, dtype: np.dtype) -> ToleranceLimits:
        """Return the limits of this level. Two levels have different limits for f16.

        Args:
            dtype: dtype of the compared values.
        """
        half = dtype == np.float16
        table = {
            TractCheckTolerance.EXACT: ToleranceLimits(0.0, 0.0),
            TractCheckTolerance.CLOSE: ToleranceLimits(1e-3, 1e-3) if half else ToleranceLimits(1e-7, 1e-7),
            TractCheckTolerance.APPROXIMATE: ToleranceLimits(1e-3, 5e-3) if half else ToleranceLimits(1e-4, 5e-4),
            TractCheckTolerance.VERY: ToleranceLimits(5e-2, 1e-2),
            TractCheckTolerance.SUPER: ToleranceLimits(0.1, 0.05, 0.0001),
            TractCheckTolerance.ULTRA: ToleranceLimits(0.2, 0.1, 0.0005),
        }
        return table[self]

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ErrorClass:
    """How many elements have an absolute error above `above` and at most `up_to` (None: any)."""

    above: float
    up_to: float | None
    count: int

    def __str__(self) -> str:
        if self.up_to == 0.0:
            return f"{self.count} equal"
        return f"{self.count} {f'> {self.above:g}' if self.up_to is None else f'<= {self.up_to:g}'}"


@dataclass(frozen=True)
class Comparison:
    """How an engine's output differs from the reference.

    Attributes:
        name: the output.
        passed: within the limits (shape and element type included).
        max_abs_error, max_rel_error: worst element, absolute and relative to the reference.
        worst_index: where the worst absolute error is.
        worst_values: what the engine and PyTorch have there.
        outliers: share of elements beyond the limits.
        elements: how many there are in all.
        histogram: the elements by absolute error; empty classes are left out.
        reason: why it cannot pass whatever the values (shape, element type), or "".
    """

    name: str
    passed: bool
    max_abs_error: float
    max_rel_error: float
    worst_index: tuple[int, ...]
    outliers: float
    reason: str = ""
    worst_values: tuple[float, float] = (0.0, 0.0)
    elements: int = 0
    histogram: tuple[ErrorClass, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """Return the record as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.reason:
            return f"output {self.name!r}: {self.reason}"
        got, wanted = self.worst_values
        return (
            f"output {self.name!r}: max abs error {self.max_abs_error:.3g} at {list(self.worst_index)} ({got:.6g}, "
            f"expected {wanted:.6g}), max rel error {self.max_rel_error:.3g}, {self.outliers:.2%} of "
            f"{self.elements} elements exceed the tolerance (errors: {', '.join(map(str, self.histogram))})"
        )


def tolerance_of(given: str | TractCheckTolerance | ToleranceLimits) -> TractCheckTolerance | ToleranceLimits:
    """Return a tolerance given as one of tract's levels, the name of one, or limits in numbers.

    Raises:
        OptionError: it is none of these.
    """
    if isinstance(given, (TractCheckTolerance, ToleranceLimits)):
        return given
    try:
        return TractCheckTolerance(given)
    except ValueError:
        levels = ", ".join(level.value for level in TractCheckTolerance)
        raise OptionError(f"{given!r} is not a tolerance.", f"Use ToleranceLimits, or one of {levels}.") from None


def compare(name: str, candidate: np.ndarray, reference: np.ndarray, limits: ToleranceLimits) -> Comparison:
    """Compare one output element by element; NaN equals NaN, an infinity its like, and nothing else."""
    if candidate.shape != reference.shape:
        reason = f"shape {list(candidate.shape)}, but PyTorch has {list(reference.shape)}"
        return Comparison(name, False, np.inf, np.inf, (), 1.0, reason)
    if candidate.dtype != reference.dtype:
        reason = f"dtype {candidate.dtype}, but PyTorch has {reference.dtype}"
        return Comparison(name, False, np.inf, np.inf, (), 1.0, reason)
    if reference.size == 0:
        return Comparison(name, True, 0.0, 0.0, (), 0.0)
    left, right = candidate.astype(np.float64), reference.astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(left - right))
        error = np.where(np.isnan(error), np.inf, error)
        relative = np.where(same, 0.0, error / np.abs(right))
        finite = np.where(np.isfinite(right), np.abs(right), 0.0)
        allowed = limits.absolute + limits.relative * finite + limits.of_largest * float(finite.max())
    outliers = float(np.mean(error > allowed))
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    return Comparison(
        name=name,
        passed=outliers <= limits.outliers,
        max_abs_error=float(error.max()),
        max_rel_error=float(np.nanmax(relative)),
        worst_index=tuple(int(i) for i in worst),
        outliers=outliers,
        worst_values=(float(left[worst]), float(right[worst])),
        elements=int(error.size),
        histogram=_histogram(error),
    )


def _histogram(error: np.ndarray) -> tuple[ErrorClass, ...]:
    counts = np.bincount(np.searchsorted(ERROR_CLASSES, error.ravel(), side="left"), minlength=len(ERROR_CLASSES) + 1)
    bounds = (-1.0, *ERROR_CLASSES, None)
    return tuple(
        ErrorClass(max(0.0, bounds[index] or 0.0), bounds[index + 1], int(count))
        for index, count in enumerate(counts)
        if count
    )

"""How close is close: tract's own tolerance levels, and a record of where and how much two arrays differ.

In: what an engine answered and what PyTorch did. Out: `Comparison`, plain data that prints itself on one line.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from generic_export.errors import OptionError

Array = np.ndarray

# Upper bounds of the classes of absolute error; the last class is everything beyond.
ERROR_CLASSES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

# Of the root mean square of an output; the rounding steps of these types are 6e-8, 5e-4 and 4e-3.
FLOORS = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
OWN_ERROR_FACTOR = 4.0


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
        outliers: share of elements beyond the limits.
        reason: why it cannot pass whatever the values (shape, element type), or "".
        worst_values: what the engine and PyTorch have there.
        elements: how many there are in all.
        histogram: the elements by absolute error; empty classes are left out.
        allowed: the largest absolute error that passes at the element where most is allowed.
        rms: root mean square of the reference's finite elements.
        snr_db: 10 log10 of signal power over error power; infinite when equal.
        same_top1, kl_divergence: for logits, share of rows with the same arg max, mean Kullback-Leibler divergence (nats).
        own_error: largest absolute error of PyTorch itself in this element type, against float64; None when unknown.
        set_index: the input set.
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
    allowed: float = 0.0
    rms: float = 0.0
    snr_db: float = math.inf
    same_top1: float | None = None
    kl_divergence: float | None = None
    own_error: float | None = None
    set_index: int = 0

    @property
    def share_of_rms(self) -> float:
        """The largest absolute error over the root mean square of the reference."""
        if self.rms:
            return self.max_abs_error / self.rms
        return math.inf if self.max_abs_error else 0.0

    @property
    def share_of_allowed(self) -> float:
        """The largest absolute error over what is allowed: beyond 1 it does not pass."""
        if self.reason or math.isnan(self.max_abs_error):
            return math.inf
        if self.allowed > 0:
            return self.max_abs_error / self.allowed
        return math.inf if self.max_abs_error else 0.0

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


def compare(
    name: str, candidate: Array, reference: Array, limits: ToleranceLimits, *, any_float: bool = False
) -> Comparison:
    """Compare one output element by element; NaN equals NaN, an infinity its like, and nothing else.

    Args:
        name: of the output; logits have "logits" in it.
        candidate: the engine's.
        reference: PyTorch's.
        limits: what passes.
        any_float: floats of another size than the reference's are no failure by themselves.
    """
    reason = _reason(candidate, reference, any_float)
    if reason:
        return Comparison(name, False, math.inf, math.inf, (), 1.0, reason, snr_db=-math.inf)
    if reference.size == 0:
        return Comparison(name, True, 0.0, 0.0, (), 0.0)
    left, right = candidate.astype(np.float64), reference.astype(np.float64)
    error = absolute_errors(left, right)
    finite = np.where(np.isfinite(right), np.abs(right), 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        relative = np.where(error == 0, 0.0, error / np.abs(right))
        allowed = limits.absolute + limits.relative * finite + limits.of_largest * float(finite.max())
    outliers = float(np.mean(error > allowed))
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    are_logits = "logits" in name and left.ndim > 1 and left.shape[-1] > 1
    divergences, same = logit_agreement(left, right) if are_logits else (None, None)
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
        allowed=float(np.max(allowed)),
        rms=root_mean_square(right),
        snr_db=_signal_to_noise(error, finite),
        same_top1=None if same is None else float(np.mean(same)),
        kl_divergence=None if divergences is None else float(np.mean(divergences)),
    )


def absolute_errors(candidate: Array, reference: Array) -> Array:
    """Return |candidate - reference| in float64, infinite where one alone is NaN or infinite."""
    left, right = candidate.astype(np.float64), reference.astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.abs(left - right))
    return np.where(np.isnan(error), np.inf, error)


def largest_error(candidate: Array, reference: Array) -> float:
    """Return the largest absolute error; infinite for another shape."""
    if candidate.shape != reference.shape:
        return math.inf
    return float(absolute_errors(candidate, reference).max(initial=0.0))


def root_mean_square(values: Array) -> float:
    """Return the root mean square of all elements; elements that are not finite count as 0."""
    wide = values.astype(np.float64)
    return float(np.sqrt(np.mean(np.square(np.where(np.isfinite(wide), wide, 0.0))))) if wide.size else 0.0


def logit_agreement(candidate: Array, reference: Array) -> tuple[Array, Array]:
    """Compare rows of logits [..., V]: the candidate's divergence from the reference (nats), and whether both prefer one token."""
    log_p, log_q = _log_softmax(reference.astype(np.float64)), _log_softmax(candidate.astype(np.float64))
    divergences = np.maximum(0.0, np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))
    return divergences, candidate.argmax(-1) == reference.argmax(-1)


def _log_softmax(rows: Array) -> Array:
    shifted = np.nan_to_num(rows - rows.max(axis=-1, keepdims=True), neginf=-1e30)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def _reason(candidate: Array, reference: Array, any_float: bool) -> str:
    if candidate.shape != reference.shape:
        return f"shape {list(candidate.shape)}, but PyTorch has {list(reference.shape)}"
    both_float = candidate.dtype.kind == reference.dtype.kind == "f"
    if candidate.dtype != reference.dtype and not (any_float and both_float):
        return f"dtype {candidate.dtype}, but PyTorch has {reference.dtype}"
    return ""


def _signal_to_noise(error: Array, reference: Array) -> float:
    noise, signal = float(np.sum(np.square(error))), float(np.sum(np.square(reference)))
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and math.isfinite(noise) else -math.inf


@dataclass(frozen=True)
class MeasuredTolerance:
    """Limits of a float type: a share of an output's root mean square, or a few times what PyTorch itself is off in that type.

    Attributes:
        atol, rtol: limits given by the user, |a - b| <= atol + rtol * |b|; None for the measured ones.
    """

    atol: float | None = None
    rtol: float | None = None

    def compare(
        self, name: str, answer: Array, reference: Array, dtype: str, exact: Callable[[], Array | None]
    ) -> Comparison:
        """Compare one output.

        Args:
            name: of the output.
            answer: the engine's.
            reference: PyTorch's.
            dtype: element type that PyTorch computed in.
            exact: gives the same output computed in float64, when asked; None where that is impossible.
        """
        found = compare(name, answer, reference, self._limits(reference, dtype), any_float=True)
        given = self.atol is not None or self.rtol is not None
        precise = None if found.passed or found.reason or given or reference.dtype.kind != "f" else exact()
        if precise is None or precise.shape != reference.shape:
            return found
        own = largest_error(reference, precise)
        allowed = max(found.allowed, OWN_ERROR_FACTOR * own) if math.isfinite(own) else found.allowed
        return replace(found, passed=found.max_abs_error <= allowed, allowed=allowed, own_error=own)

    def _limits(self, reference: Array, dtype: str) -> ToleranceLimits:
        if reference.dtype.kind != "f":
            return ToleranceLimits()
        if self.atol is not None or self.rtol is not None:
            return ToleranceLimits(self.atol or 0.0, self.rtol or 0.0)
        return ToleranceLimits(FLOORS.get(dtype, FLOORS["float32"]) * root_mean_square(reference))


def _histogram(error: np.ndarray) -> tuple[ErrorClass, ...]:
    counts = np.bincount(np.searchsorted(ERROR_CLASSES, error.ravel(), side="left"), minlength=len(ERROR_CLASSES) + 1)
    bounds = (-1.0, *ERROR_CLASSES, None)
    return tuple(
        ErrorClass(max(0.0, bounds[index] or 0.0), bounds[index + 1], int(count))
        for index, count in enumerate(counts)
        if count
    )

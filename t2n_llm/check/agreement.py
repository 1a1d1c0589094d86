"""What agreement is: a tolerance, compared steps, checks, and the report of an archive; the same records for every task.

In: arrays of the engine and of PyTorch. Out: a `ValidationReport`; printing it is somebody else's job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from generic_export.compare.comparison import largest_error, logit_agreement
from generic_export.errors import OptionError, ValidationError


@dataclass(frozen=True)
class Tolerance:
    """What counts as agreement for an element type.

    Attributes:
        rtol: of the logits, relative to the largest reference logit of the step (at least 1).
        max_kl_divergence: of the next-token distributions of a step, in nats.
        atol: of the logits, absolute; added to `rtol` times the largest logit.
    """

    rtol: float
    max_kl_divergence: float
    atol: float = 0.0

    def limited(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Return it with limits of one's own: `atol + rtol * largest logit`; None for both leaves it as it is."""
        if atol is None and rtol is None:
            return self
        return replace(self, atol=atol or 0.0, rtol=rtol or 0.0)

    @staticmethod
    def for_dtype(dtype: str) -> Tolerance:
        """Return the tolerance for archives of `f32` or `f16`.

        f32: rounding of sums in another order. f16: 11 bits of mantissa through tens of layers give logits that are
        right to about one percent, and distributions that are indistinguishable.

        Raises:
            OptionError: the element type is unknown.
        """
        table = {"f32": Tolerance(1e-4, 1e-6), "f16": Tolerance(2e-2, 5e-3)}
        if dtype not in table:
            raise OptionError(f"no tolerance is defined for dtype {dtype!r}.", f"Known: {', '.join(table)}.")
        return table[dtype]

    @staticmethod
    def for_export(dtype: str, kv_cache: str | None = None, *, mixed: bool = False) -> Tolerance:
        """Return the tolerance for archives of an element type.

        A quantised cache changes what the model says, it is not a fault of the graph: the limits only tell a cache of that
        resolution from a wrong one, and the checks report the difference.

        Args:
            dtype: of weights, `f32` or `f16`.
            kv_cache: `int8` or `int4` for a cache that is quantised to that.
            mixed: f16 weights and caches under f32 activations, where each value is rounded once, when it is stored.
        """
        if kv_cache is not None:
            return {"int8": Tolerance(0.03, 0.01), "int4": Tolerance(0.5, 0.5)}[kv_cache]
        return Tolerance(2e-2, 1e-3) if mixed else Tolerance.for_dtype(dtype)


@dataclass(frozen=True)
class StepResult:
    """One compared position.

    Attributes:
        step: position in the check.
        max_abs_error: worst value.
        scale: largest absolute reference value, at least 1 of logits of tokens.
        kl_divergence: of candidate from reference, nats; None where the values are no logits of tokens.
        same_top1: both prefer the same token; None likewise.
        top1_gap: how much the reference prefers its token to the candidate's (0 when they are the same).
    """

    step: int
    max_abs_error: float
    scale: float
    kl_divergence: float | None = None
    same_top1: bool | None = None
    top1_gap: float = 0.0

    def agrees(self, tolerance: Tolerance) -> bool:
        """Say whether the step is within tolerance; another favourite token must be a tie at this resolution."""
        limit = tolerance.atol + tolerance.rtol * self.scale
        close = self.max_abs_error <= limit and (self.kl_divergence or 0.0) <= tolerance.max_kl_divergence
        return close and (self.same_top1 is not False or self.top1_gap <= 2 * limit)


@dataclass(frozen=True)
class CheckResult:
    """One check, or one case of it.

    Attributes:
        name: what is asked: `prefill`, `greedy`, `a batch padded on the left`.
        passed: every step agrees.
        steps: the compared positions.
        note: what a reader should know (a tie that greedy decoding resolved differently, why a check stopped).
        shape: texts and tokens of the input, where a check is one question.
    """

    name: str
    passed: bool
    steps: tuple[StepResult, ...]
    note: str = ""
    shape: tuple[int, int] | None = None

    @property
    def max_abs_error(self) -> float:
        """Worst value of all steps."""
        return max((step.max_abs_error for step in self.steps), default=0.0)

    @property
    def max_kl_divergence(self) -> float:
        """Worst step, in nats; 0 where none is measured."""
        return max((step.kl_divergence or 0.0 for step in self.steps), default=0.0)

    @property
    def same_top1_count(self) -> int:
        """Steps where both prefer the same token."""
        return sum(bool(step.same_top1) for step in self.steps)

    @property
    def scale(self) -> float:
        """Largest absolute reference value, at least 1."""
        return max((step.scale for step in self.steps), default=1.0)

    @property
    def compares_tokens(self) -> bool:
        """Whether the values are logits of tokens, which have a divergence and a favourite."""
        return any(step.same_top1 is not None for step in self.steps)

    @staticmethod
    def judged(
        name: str,
        steps: Sequence[StepResult],
        tolerance: Tolerance,
        note: str = "",
        shape: tuple[int, int] | None = None,
    ) -> CheckResult:
        """Return the outcome of compared steps; none at all is no agreement."""
        passed = bool(steps) and all(step.agrees(tolerance) for step in steps)
        return CheckResult(name, passed, tuple(steps), note, shape)


@dataclass(frozen=True)
class Agreement:
    """How a compressed model's next-token distributions relate to the original's; information, not a check.

    Attributes:
        positions: of the check's text.
        mean_kl_divergence, max_kl_divergence: of the compressed model from the original, nats.
        same_top1_count: positions where both prefer the same token.
    """

    positions: int
    mean_kl_divergence: float
    max_kl_divergence: float
    same_top1_count: int


@dataclass(frozen=True)
class ValidationReport:
    """The checks of an export with one engine.

    Attributes:
        engine, engine_version: what ran the archive.
        dtype: element type of its graph.
        tolerance: what counts as agreement.
        checks: their results.
        original: how a compressed model agrees with the one it was made from, or None.
        largest_states: the largest magnitude that PyTorch saw in each kind of state.
    """

    engine: str
    engine_version: str
    dtype: str
    tolerance: Tolerance
    checks: tuple[CheckResult, ...]
    original: Agreement | None = None
    largest_states: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def failure(self, subject: str, hint: str) -> FailedValidationError:
        """Return the error that says which check failed; of a report that did not pass."""
        return FailedValidationError(subject, hint, self)

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON, steps included."""
        checks = [
            asdict(check)
            | {
                "max_abs_error": check.max_abs_error,
                "max_kl_divergence": check.max_kl_divergence,
                "same_top1_count": check.same_top1_count,
            }
            for check in self.checks
        ]
        return {
            "passed": self.passed,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "dtype": self.dtype,
            "tolerance": asdict(self.tolerance),
            "checks": checks,
            "compressed_vs_original": asdict(self.original) if self.original is not None else None,
            "state_max_abs": dict(self.largest_states),
        }


def compare_step(step: int, candidate: np.ndarray, reference: np.ndarray) -> StepResult:
    """Compare one row of logits [vocab] with the reference's.

    Tokens that both exclude, with the least number of their type, count for neither error nor scale.
    """
    left, right = (row.astype(np.float64).reshape(1, -1) for row in (candidate, reference))
    excluded = _excluded(candidate) & _excluded(reference) if candidate.shape == reference.shape else False
    found = compare_values(step, np.where(excluded, 0.0, left), np.where(excluded, 0.0, right))
    if not np.isfinite(left).all():
        return replace(found, max_abs_error=np.inf, kl_divergence=np.inf, same_top1=False, top1_gap=np.inf)
    divergences, same = logit_agreement(left, right)
    gap = float(right.max() - right[0, left.argmax()])
    return replace(found, kl_divergence=float(divergences[0]), same_top1=bool(same[0]), top1_gap=gap)


def _excluded(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits == np.finfo(logits.dtype).min).reshape(1, -1)


def compare_values(
    step: int, candidate: np.ndarray, reference: np.ndarray, *, smallest_scale: float = 1.0
) -> StepResult:
    """Compare tensors that are no logits of tokens; another shape, and a value that is not finite, are an infinite error."""
    scale = max(smallest_scale, float(np.abs(reference).max(initial=0.0)))
    error = largest_error(candidate, reference) if np.isfinite(candidate).all() else np.inf
    return StepResult(step, error, scale)


class FailedValidationError(ValidationError):
    """A `ValidationError` that carries its report."""

    def __init__(self, subject: str, hint: str, report: ValidationReport) -> None:
        bad = next(check for check in report.checks if not check.passed)
        super().__init__(f"{subject}: tract differs from PyTorch {_difference(bad)}.", hint)
        self.report = report


def _difference(bad: CheckResult) -> str:
    detail = f" ({bad.note})" if bad.note else ""
    if bad.compares_tokens:
        return (
            f"in the {bad.name} check: max abs error {bad.max_abs_error:.3g}, KL {bad.max_kl_divergence:.3g}, "
            f"same token in {bad.same_top1_count} of {len(bad.steps)}{detail}"
        )
    size = " ({} x {} tokens)".format(*bad.shape) if bad.shape is not None else ""
    return f"on {bad.name}{size}: max abs error {bad.max_abs_error:.3g} of values up to {bad.scale:.3g}{detail}"

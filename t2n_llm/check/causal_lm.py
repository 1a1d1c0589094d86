"""Token by token: does the engine say what PyTorch says? Four checks, each a list of compared steps.

Prefill at another length than the traced one, prefill in chunks, decode with the cache fed back (teacher-forced on
PyTorch's greedy tokens), and free greedy generation with the cache as engine state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from generic_export.errors import OptionError, ValidationError
from t2n_llm.check.reference import ReferenceRun
from t2n_llm.check.runner import Runner


@dataclass(frozen=True)
class Tolerance:
    """What counts as agreement for an element type.

    Attributes:
        max_abs_error: of the logits, as a share of the largest reference logit of the step (at least 1).
        kl_divergence: of the next-token distributions, in nats, per step.
        absolute: of the logits, added to that share.
    """

    max_abs_error: float
    kl_divergence: float
    absolute: float = 0.0

    def limited(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Return it with limits of one's own: `atol + rtol * largest logit`; None for both leaves it as it is."""
        if atol is None and rtol is None:
            return self
        return replace(self, absolute=atol or 0.0, max_abs_error=rtol or 0.0)

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
            raise OptionError(f"no tolerance for element type {dtype!r}.", f"Known: {', '.join(table)}.")
        return table[dtype]

    @staticmethod
    def for_export(dtype: str, kv_cache: str | None = None) -> Tolerance:
        """Return the tolerance for archives of an element type, whose cache may be quantised to `int8` or `int4`.

        A quantised cache changes what the model says, it is not a fault of the graph: the limits only tell a cache of that
        resolution from a wrong one, and the checks report the difference.
        """
        return {"int8": Tolerance(0.03, 0.01), "int4": Tolerance(0.5, 0.5)}.get(
            kv_cache or "", Tolerance.for_dtype(dtype)
        )


@dataclass(frozen=True)
class StepResult:
    """One compared position.

    Attributes:
        step: position in the check.
        max_abs_error: worst logit.
        scale: largest absolute reference logit, at least 1.
        kl_divergence: of candidate from reference, nats.
        same_top1: both prefer the same token.
        top1_gap: how much the reference prefers its token to the candidate's (0 when they are the same).
    """

    step: int
    max_abs_error: float
    scale: float
    kl_divergence: float
    same_top1: bool
    top1_gap: float

    def agrees(self, tolerance: Tolerance) -> bool:
        """Say whether the step is within tolerance; another favourite token must be a tie at this resolution."""
        limit = tolerance.absolute + tolerance.max_abs_error * self.scale
        close = self.max_abs_error <= limit and self.kl_divergence <= tolerance.kl_divergence
        return close and (self.same_top1 or self.top1_gap <= 2 * limit)


@dataclass(frozen=True)
class CheckResult:
    """One of the four checks.

    Attributes:
        name: `prefill`, `chunked prefill`, `decode` or `greedy`.
        passed: every step agrees.
        steps: the compared positions.
        note: what a reader should know (a tie that greedy decoding resolved differently, why a check stopped).
    """

    name: str
    passed: bool
    steps: tuple[StepResult, ...]
    note: str = ""

    @property
    def max_abs_error(self) -> float:
        """Worst logit of all steps."""
        return max((step.max_abs_error for step in self.steps), default=0.0)

    @property
    def max_kl_divergence(self) -> float:
        """Worst step, in nats."""
        return max((step.kl_divergence for step in self.steps), default=0.0)

    @property
    def same_top1(self) -> int:
        """Steps where both prefer the same token."""
        return sum(step.same_top1 for step in self.steps)


@dataclass(frozen=True)
class Agreement:
    """How a compressed model's next-token distributions relate to the original's; information, not a check.

    Attributes:
        positions: of the check's text.
        mean_kl_divergence, max_kl_divergence: of the compressed model from the original, nats.
        same_top1: positions where both prefer the same token.
    """

    positions: int
    mean_kl_divergence: float
    max_kl_divergence: float
    same_top1: int

    @staticmethod
    def of(reference: ReferenceRun) -> Agreement | None:
        """Return the agreement that a reference run recorded; None when the model is not compressed."""
        if reference.original_logits is None:
            return None
        rows = zip(reference.text_logits, reference.original_logits, strict=True)
        steps = [compare_step(index, row, original) for index, (row, original) in enumerate(rows)]
        divergences = [step.kl_divergence for step in steps]
        same = sum(step.same_top1 for step in steps)
        return Agreement(len(steps), float(np.mean(divergences)), max(divergences), same)


@dataclass(frozen=True)
class ValidationReport:
    """The four checks of one archive with one engine.

    Attributes:
        engine, engine_version: what ran the archive.
        dtype: element type of its graph.
        tolerance: what counts as agreement.
        checks: their results.
        original: how a compressed model agrees with the one it was made from, or None.
    """

    engine: str
    engine_version: str
    dtype: str
    tolerance: Tolerance
    checks: tuple[CheckResult, ...]
    original: Agreement | None = None

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
                "same_top1": check.same_top1,
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
            "original": asdict(self.original) if self.original is not None else None,
        }


def compare_step(step: int, candidate: np.ndarray, reference: np.ndarray) -> StepResult:
    """Compare one row of logits [vocab] with the reference's."""
    left, right = candidate.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    if not np.isfinite(left).all():
        return StepResult(step, np.inf, float(max(1.0, np.abs(right).max())), np.inf, False, np.inf)
    log_p, log_q = _log_softmax(right), _log_softmax(left)
    divergence = float(np.sum(np.exp(log_p) * (log_p - log_q)))
    best, chosen = int(right.argmax()), int(left.argmax())
    return StepResult(
        step=step,
        max_abs_error=float(np.abs(left - right).max()),
        scale=float(max(1.0, np.abs(right).max())),
        kl_divergence=max(0.0, divergence),
        same_top1=best == chosen,
        top1_gap=float(right[best] - right[chosen]),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def validate_archive(
    runner: Runner,
    reference: ReferenceRun,
    dtype: str,
    *,
    tolerance: Tolerance | None = None,
    on_check: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Run the four checks.

    Args:
        runner: the archive in an engine.
        reference: what PyTorch said.
        dtype: `f32` or `f16`, of the archive.
        tolerance: None takes the element type's.
        on_check: told the name of each check before it runs.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    tolerance = tolerance or Tolerance.for_dtype(dtype)
    announce = on_check or (lambda _: None)
    checks = []
    for name, check in _CHECKS.items():
        announce(name)
        checks.append(check(name, runner, reference, tolerance))
    original = Agreement.of(reference)
    return ValidationReport(runner.engine_name, runner.engine_version, dtype, tolerance, tuple(checks), original)


def _prefill(name: str, runner: Runner, reference: ReferenceRun, tolerance: Tolerance) -> CheckResult:
    """The whole text at once."""
    text = reference.plan.text_ids
    (logits,) = runner.run_turns([text], stateful=False)
    return _judged(name, _rows(logits, reference.text_logits, len(text)), tolerance)


def _chunked_prefill(name: str, runner: Runner, reference: ReferenceRun, tolerance: Tolerance) -> CheckResult:
    """The same text in chunks, the cache fed back between them."""
    ends = reference.plan.chunk_ends
    chunks = [reference.plan.text_ids[start:end] for start, end in pairwise((0, *ends))]
    answers = runner.run_turns(chunks, stateful=False)
    steps = [
        step for logits, end in zip(answers, ends, strict=True) for step in _rows(logits, reference.text_logits, end)
    ]
    return _judged(name, steps, tolerance)


def _rows(logits: np.ndarray, reference: np.ndarray, end: int) -> list[StepResult]:
    """Compare the kept rows, which are the last ones before position `end`."""
    first = end - len(logits)
    return [compare_step(first + index, row, reference[first + index]) for index, row in enumerate(logits)]


def _decoding_turns(reference: ReferenceRun, ids: Sequence[int]) -> list[Sequence[int]]:
    prompt = reference.plan.text_ids[: reference.plan.prompt_length]
    return [prompt, *((token,) for token in ids[:-1])]


def _decode(name: str, runner: Runner, reference: ReferenceRun, tolerance: Tolerance) -> CheckResult:
    """One token at a time, the cache fed back; PyTorch's tokens are fed, whatever the engine prefers."""
    answers = runner.run_turns(_decoding_turns(reference, reference.decode_ids), stateful=False)
    steps = [
        compare_step(step, logits[-1], expected)
        for step, (logits, expected) in enumerate(zip(answers, reference.decode_logits, strict=True))
    ]
    note = "the text's own tokens, as PyTorch's weights are on disk" if reference.plan.teacher_forced else ""
    return _judged(name, steps, tolerance, note)


def _greedy(name: str, runner: Runner, reference: ReferenceRun, tolerance: Tolerance) -> CheckResult:
    """Free generation with the cache as engine state.

    Feeding the engine its own tokens is feeding it PyTorch's, up to the first one that differs; there the check stops
    and says how clearly PyTorch preferred its own.
    """
    answers = runner.run_turns(_decoding_turns(reference, reference.greedy_ids), stateful=True)
    steps: list[StepResult] = []
    for step, (logits, expected) in enumerate(zip(answers, reference.greedy_logits, strict=True)):
        steps.append(compare_step(step, logits[-1], expected))
        if not steps[-1].same_top1:
            verdict = "a tie at this resolution" if steps[-1].agrees(tolerance) else "a real difference"
            note = f"token {step} differs: PyTorch prefers its own by {steps[-1].top1_gap:.3g} logits, {verdict}"
            return _judged(name, steps, tolerance, note)
    plan = reference.plan
    cut = f"{plan.greedy_steps} tokens instead of {plan.decode_steps}, as PyTorch's weights are on disk"
    return _judged(name, steps, tolerance, cut if plan.greedy_steps < plan.decode_steps else "")


def _judged(name: str, steps: Sequence[StepResult], tolerance: Tolerance, note: str = "") -> CheckResult:
    passed = bool(steps) and all(step.agrees(tolerance) for step in steps)
    return CheckResult(name, passed, tuple(steps), note)


_Check = Callable[[str, Runner, ReferenceRun, Tolerance], CheckResult]

_CHECKS: dict[str, _Check] = {
    "prefill": _prefill,
    "chunked prefill": _chunked_prefill,
    "decode": _decode,
    "greedy": _greedy,
}


class FailedValidationError(ValidationError):
    """A `ValidationError` that carries its report."""

    def __init__(self, subject: str, hint: str, report: ValidationReport) -> None:
        bad = next(check for check in report.checks if not check.passed)
        detail = f" ({bad.note})" if bad.note else ""
        super().__init__(
            f"{subject}: tract disagrees with PyTorch in the {bad.name} check: max abs error "
            f"{bad.max_abs_error:.3g}, KL {bad.max_kl_divergence:.3g}, same token in {bad.same_top1} of {len(bad.steps)}"
            f"{detail}.",
            hint,
        )
        self.report = report

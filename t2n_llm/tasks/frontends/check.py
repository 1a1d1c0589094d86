"""The front end in the engine against the model's own feature extractor or image processor.

In: the archive `frontend` of an export, beside its source. Out: a `CheckResult` for each question, added to a task's report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from t2n_llm.check.agreement import CheckResult, Tolerance, ValidationReport, compare_values
from t2n_llm.check.archive_sessions import open_archive_session
from t2n_llm.check.options import EngineOptions
from t2n_llm.tasks.frontends.kind import FrontEnd, FrontEndCase

TOLERANCES = {"f32": Tolerance(1e-4, 0.0), "f16": Tolerance(1e-3, 0.0)}
"""By the element type that is handed over: what is computed in f32 is rounded once, at the end."""


def check_frontend(
    archive: Path, front: FrontEnd, dtype: str, engine: EngineOptions | None = None, seed: int = 0
) -> tuple[CheckResult, ...]:
    """Compare an archive with the processor that it stands for.

    Args:
        archive: folder or file.
        front: what it was made of.
        dtype: `f32` or `f16`, of its outputs.
        engine: see `open_archive_session`.
        seed: of what is heard or seen.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    cases = front.cases(np.random.default_rng(seed))
    with open_archive_session(archive, engine) as answerer:
        return tuple(_judged(case, answerer.answer(case.inputs), TOLERANCES[dtype]) for case in cases)


def _judged(case: FrontEndCase, answers: Sequence[np.ndarray], tolerance: Tolerance) -> CheckResult:
    pairs = zip(answers, case.expected, strict=True)
    return CheckResult.judged(
        case.name, [compare_values(place, got, wanted) for place, (got, wanted) in enumerate(pairs)], tolerance
    )


def with_frontend(
    report: ValidationReport, archive: Path, front: FrontEnd, dtype: str, engine: EngineOptions
) -> ValidationReport:
    """Return a task's report with the checks of its front end before the others.

    Args:
        report: of the archives that read weights.
        archive, front, dtype, engine: see `check_frontend`.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    return replace(report, checks=(*check_frontend(archive, front, dtype, engine), *report.checks))


__all__ = ["TOLERANCES", "check_frontend", "with_frontend"]

"""Does the engine say what PyTorch says? A few questions of other sizes than the traced ones, texts with padding on either side.

In: a model's folder and its exported archive. Out: a `ValidationReport`. transformers' own eager model in f32 is the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.inference_target.tract.engines.cli import write_bundle
from t2n_llm.check.agreement import CheckResult, StepResult, Tolerance, ValidationReport, compare_values
from t2n_llm.check.archive_sessions import ArchiveSession
from t2n_llm.tasks.heads.cases import HeadCase
from t2n_llm.tasks.heads.model import answers_of
from t2n_llm.tasks.heads.pooling import Pooling
from t2n_llm.tasks.heads.table import Head

_SMALLEST_SCALE = 0.1  # vectors of length 1 have small values; below this, rounding of what they are sums of is seen

Answers = Mapping[str, np.ndarray]
"""Outputs by name."""


def run_head_reference(model: Any, cases: Sequence[HeadCase], pooling: Pooling | None = None) -> list[Answers]:
    """Return the outputs of a model for each case.

    Args:
        model: of transformers, in f32.
        cases: the inputs.
        pooling: makes one row of those of the tokens.
    """
    with torch.no_grad():
        return [_ask(model, case, pooling) for case in cases]


def _ask(model: Any, case: HeadCase, pooling: Pooling | None) -> Answers:
    inputs = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    answers = answers_of(model(**inputs, return_dict=True), inputs, pooling)
    return {name: tensor.float().numpy() for name, tensor in answers.items()}


def check_head(
    answerer: ArchiveSession,
    head: Head,
    outputs: Sequence[str],
    dtype: str,
    cases: Sequence[HeadCase],
    expected: Sequence[Answers],
    *,
    tolerance: Tolerance | None = None,
    on_case: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Compare an archive with what PyTorch said.

    Args:
        answerer: the archive in an engine.
        head: says what is not compared.
        outputs: of the archive, in its order.
        dtype: `f32` or `f16`, of the archive.
        cases, expected: the questions, and the outputs of PyTorch for each.
        tolerance: None takes the element type's; its divergence has no meaning here.
        on_case: told the name of each case before it runs.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    tolerance = tolerance or Tolerance.for_dtype(dtype)
    checks = []
    for case, wanted in zip(cases, expected, strict=True):
        if on_case is not None:
            on_case(case.name)
        got = dict(zip(outputs, answerer.answer(list(case.inputs.values())), strict=True))
        checks.append(
            CheckResult.judged(case.name, compared(head, outputs, case, got, wanted), tolerance, shape=case.shape)
        )
    return ValidationReport(answerer.engine_name, answerer.engine_version, dtype, tolerance, tuple(checks))


def compared(head: Head, outputs: Sequence[str], case: HeadCase, got: Answers, wanted: Answers) -> list[StepResult]:
    """Compare the answers to one case, output by output, padding left out.

    Args:
        head: says what is not compared.
        outputs: of the archive, in its order.
        case: what was asked.
        got, wanted: the outputs by name.
    """
    return [_compared(place, head, case, got[name], wanted[name]) for place, name in enumerate(outputs)]


def _compared(place: int, head: Head, case: HeadCase, got: np.ndarray, wanted: np.ndarray) -> StepResult:
    """Compare one output, padding left out."""
    mask = case.mask if head.per_token else None
    seen = mask == 1 if mask is not None and wanted.shape[: mask.ndim] == mask.shape else ...
    compared_values = got[seen] if got.shape == wanted.shape else np.empty(0)
    return compare_values(place, compared_values, wanted[seen], smallest_scale=_SMALLEST_SCALE)


def write_head_bundles(
    folder: Path, cases: Sequence[HeadCase], outputs: Sequence[str], expected: Sequence[Answers]
) -> None:
    """Write each case as an npz that tract's command line reads; see `t2n_llm.check.bundles`."""
    for case, wanted in zip(cases, expected, strict=True):
        name = case.name.replace(", ", "_").replace(" ", "_")
        write_bundle(folder / f"{name}.npz", [case.inputs], {output: wanted[output] for output in outputs})


__all__ = ["Answers", "check_head", "compared", "run_head_reference", "write_head_bundles"]

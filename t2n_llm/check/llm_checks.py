"""Token by token: does the engine say what PyTorch says? Four checks, each a list of compared steps.

Prefill at another length than the traced one, prefill in chunks, decode with the cache fed back (teacher-forced on
PyTorch's greedy tokens), and free greedy generation with the cache as engine state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from generic_export.devices import CPU
from kvcache.states.tensors import StateTensor
from t2n_llm.check.agreement import Agreement, CheckResult, StepResult, Tolerance, ValidationReport, compare_step
from t2n_llm.check.devices import EngineKeepsCaches, device_checks
from t2n_llm.check.options import EngineOptions
from t2n_llm.check.reference import ReferenceRun
from t2n_llm.check.runner import Runner, open_runner
from t2n_llm.reporter import Steps


def agreement_with_original(stored: ReferenceRun, original: ReferenceRun) -> Agreement:
    """Compare the next-token distributions of a compressed model with those of the model that it was made from."""
    rows = zip(stored.text_logits, original.text_logits, strict=True)
    steps = [compare_step(index, row, expected) for index, (row, expected) in enumerate(rows)]
    divergences = [step.kl_divergence or 0.0 for step in steps]
    same = sum(bool(step.same_top1) for step in steps)
    return Agreement(len(steps), float(np.mean(divergences)), max(divergences), same)


def validate_in_engine(
    archive: Path,
    states: Sequence[StateTensor],
    reference: ReferenceRun,
    dtype: str,
    engine: EngineOptions,
    *,
    tolerance: Tolerance,
    on_check: Callable[[str], None],
    tell: Steps,
) -> ValidationReport:
    """Open an archive and run the four checks; on a GPU, also those of `check.devices`.

    Args:
        archive: folder or file.
        states: of its graph.
        reference: what PyTorch said.
        dtype: `f32` or `f16`, of the archive.
        engine: which one, and its device.
        tolerance: what counts as agreement.
        on_check: told the name of each check before it runs.
        tell: see `open_runner`.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    on_gpu = engine.device != CPU
    with open_runner(archive, states, dtype, engine, tell=tell) as opened:
        runner = EngineKeepsCaches(opened) if on_gpu else opened
        report = validate_archive(runner, reference, dtype, tolerance=tolerance, on_check=on_check)
        further = device_checks(runner, reference, tolerance, on_check) if on_gpu else ()
    return replace(report, checks=(*report.checks, *further))


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
    return ValidationReport(runner.engine_name, runner.engine_version, dtype, tolerance, tuple(checks))


def _prefill(name: str, runner: Runner, reference: ReferenceRun, tolerance: Tolerance) -> CheckResult:
    """The whole text at once."""
    text = reference.plan.text_ids
    (logits,) = runner.run_turns([text], stateful=False)
    return CheckResult.judged(name, _rows(logits, reference.text_logits, len(text)), tolerance)


def _chunked_prefill(name: str, runner: Runner, reference: ReferenceRun, tolerance: Tolerance) -> CheckResult:
    """The same text in chunks, the cache fed back between them."""
    ends = reference.plan.chunk_ends
    chunks = [reference.plan.text_ids[start:end] for start, end in pairwise((0, *ends))]
    answers = runner.run_turns(chunks, stateful=False)
    steps = [
        step for logits, end in zip(answers, ends, strict=True) for step in _rows(logits, reference.chunk_logits, end)
    ]
    return CheckResult.judged(name, steps, tolerance)


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
    note = "the text's own tokens, because PyTorch's weights are on disk" if reference.plan.teacher_forced else ""
    return CheckResult.judged(name, steps, tolerance, note)


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
            verdict = "a tie within the tolerance" if steps[-1].agrees(tolerance) else "a real difference"
            note = f"token {step} differs: PyTorch prefers its own by {steps[-1].top1_gap:.3g} logits, {verdict}"
            return CheckResult.judged(name, steps, tolerance, note)
    plan = reference.plan
    cut = f"{plan.greedy_steps} tokens instead of {plan.decode_steps}, because PyTorch's weights are on disk"
    return CheckResult.judged(name, steps, tolerance, cut if plan.greedy_steps < plan.decode_steps else "")


_Check = Callable[[str, Runner, ReferenceRun, Tolerance], CheckResult]

_CHECKS: dict[str, _Check] = {
    "prefill": _prefill,
    "chunked prefill": _chunked_prefill,
    "decode": _decode,
    "greedy": _greedy,
}

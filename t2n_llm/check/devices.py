"""What is checked of a language model on a GPU beside the usual checks: prompts in chunks, decoding across 128 and 256, twice.

In: a runner on the device, and PyTorch's logits of a long text. Out: `CheckResult`s. The engine keeps the caches throughout, as it
does when it generates: tract 0.23.9 on CUDA refuses casts of an empty cache that is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from generic_export.devices import CPU
from generic_export.errors import DeviceMissingError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.check.agreement import CheckResult, StepResult, Tolerance, ValidationReport, compare_step
from t2n_llm.check.reference import ReferenceRun
from t2n_llm.check.runner import Runner, Turn

DECODED = 16
"""Tokens decoded after each prompt; after 120 and 248 they cross 128 and 256 positions."""

DEVICE_TEXT = 2000 + DECODED
"""Tokens of the text that is checked on a device, where the model has so many positions."""

PROMPTS = (
    *((64, 64), (100, 64), (120, 128), (128, 128), (240, 128), (248, 64)),
    *((512, 128), (512, 512), (2000, 128), (2000, 512)),
)
"""(tokens of the prompt, tokens fed at once)."""

_BIT_FOR_BIT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class EngineKeepsCaches:
    """A runner whose turns always leave the caches to the engine."""

    runner: Runner

    @property
    def engine_name(self) -> str:
        """Name of the engine."""
        return self.runner.engine_name

    @property
    def engine_version(self) -> str:
        """Version of the engine."""
        return self.runner.engine_version

    def run_turns(self, turns: Sequence[Turn], *, stateful: bool) -> list[np.ndarray]:
        """See `Runner.run_turns`."""
        del stateful
        return self.runner.run_turns(turns, stateful=True)


def device_checks(
    runner: Runner, reference: ReferenceRun, tolerance: Tolerance, on_check: Callable[[str], None] | None = None
) -> tuple[CheckResult, ...]:
    """Run the prompts that fit in the text, each twice.

    Args:
        runner: the archive on the device.
        reference: PyTorch's logits of the text.
        tolerance: what counts as agreement.
        on_check: told the name of each check before it runs.

    Raises:
        EngineError: the engine refused the archive, or died.
    """
    ids = reference.plan.text_ids
    decoded = min(DECODED, len(ids) - 1)
    fitting = [(prompt, chunk) for prompt, chunk in PROMPTS if prompt + decoded <= len(ids)]
    results = []
    for prompt, chunk in fitting or [(len(ids) - decoded, len(ids))]:
        name = f"prompt of {prompt} in chunks of {chunk}"
        if on_check is not None:
            on_check(name)
        turns = _turns(ids, prompt, chunk, decoded)
        first, again = (runner.run_turns(turns, stateful=True) for _ in range(2))
        results.append(CheckResult.judged(name, _steps(turns, first, reference.text_logits), tolerance))
        results.append(_repeated(f"{name}, twice", first, again))
    return tuple(results)


def _turns(ids: Sequence[int], prompt: int, chunk: int, decoded: int) -> list[Turn]:
    chunks = [ids[start : min(start + chunk, prompt)] for start in range(0, prompt, chunk)]
    return [*chunks, *((token,) for token in ids[prompt : prompt + decoded])]


def _steps(turns: Sequence[Turn], answers: Sequence[np.ndarray], expected: np.ndarray) -> list[StepResult]:
    """Compare the last logits of each turn with the text's at that position."""
    ends = np.cumsum([len(turn) for turn in turns])
    return [
        compare_step(int(end) - 1, logits[-1], expected[end - 1]) for end, logits in zip(ends, answers, strict=True)
    ]


def _repeated(name: str, first: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> CheckResult:
    """Compare two runs, which must be equal bit for bit."""
    steps = [compare_step(step, two[-1], one[-1]) for step, (one, two) in enumerate(zip(first, again, strict=True))]
    result = CheckResult.judged(name, steps, _BIT_FOR_BIT)
    return result if result.passed else replace(result, note="two runs of the same tokens give different results")


def absence_of(device: str) -> str | None:
    """Return why tract from pip cannot compute on a device here; None where it can."""
    if device == CPU:
        return None
    try:
        TractWheel(device=device).require_device()
    except DeviceMissingError as error:
        return error.message
    return None


def named_after(report: ValidationReport, device: str) -> ValidationReport:
    """Return a report whose engine and checks name the device; one of the CPU stays as it is."""
    if device == CPU:
        return report
    checks = tuple(replace(check, name=f"{device}: {check.name}") for check in report.checks)
    return replace(report, engine=f"{report.engine} on {device}", checks=checks)


__all__ = ["DEVICE_TEXT", "EngineKeepsCaches", "absence_of", "device_checks", "named_after"]

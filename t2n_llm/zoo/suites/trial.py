"""One case of a suite: built, run in PyTorch, exported, and compared in the engine at two sizes or more.

In: a case and a column. Out: what was compared, or the exception of the stage that was begun last. Where f32 is ill,
float64 decides, as for the tasks of one pass (`t2n_llm.zoo.float64`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.compare.comparison import largest_error
from generic_export.half_weights import half_parameters, rounded_to_half
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm.zoo.float64 import AS_FAR_OFF, NO_JUDGE
from t2n_llm.zoo.suites.case import HALF, STATIC, ModuleCase, Sizes
from t2n_llm.zoo.verdict import Check

_EXACT = 1e-4  # of the largest value
_SPREAD = 0.1
_ENGINE_SECONDS = 120


@dataclass(frozen=True)
class Tried:
    """What became of a case.

    Attributes:
        class_name: of the module.
        checks: by name.
        reference: what they were judged by, `f32` or `f64`.
        export_seconds: of the processor, from module to archive.
    """

    class_name: str
    checks: dict[str, Check]
    reference: str
    export_seconds: float


def tried(case: ModuleCase, column: str, seed: int, folder: Path, begin: Callable[[str], None]) -> Tried:
    """Take a case through everything.

    Args:
        case: which one.
        column: `dynamic`, `static` or `half`, where the module is rounded before anything else.
        seed: of weights and inputs.
        folder: empty.
        begin: told each stage: build, pytorch, export, load, compare.

    Raises:
        Exception: whatever ends a stage.
    """
    begin("build")
    torch.manual_seed(seed)
    module = case.build().eval()
    unsettle(module)
    with rounded_to_half(module, half_parameters(module) if column == HALF else ()):
        return _compared(module, case, column, seed, folder, begin)


def _compared(
    module: nn.Module, case: ModuleCase, column: str, seed: int, folder: Path, begin: Callable[[str], None]
) -> Tried:
    begin("pytorch")
    sizes = (case.sizes, case.sizes) if column == STATIC else (case.sizes, case.other, *case.more)
    given = [case.drawn(each, seed + number) for number, each in enumerate(sizes)]
    runs = [_run(module, args) for args in given]
    begin("export")
    start = time.process_time()
    target = TractNNEF(check_io=False, dynamic_axes={} if column == STATIC else case.dynamic_axes)
    archive = export_model_to_nnef(
        module,
        given[0],
        folder / "case",
        target,
        tuple(case.inputs),
        compression_level=None,
        log_level=None,
        half=column == HALF,
    )
    seconds = time.process_time() - start
    begin("load")
    with TractWheel(timeout_seconds=_ENGINE_SECONDS).load(archive) as engine:
        begin("compare")
        answers = [engine.run(list(run.inputs)) for run in runs]
    checks, reference = _judged(module, given, sizes, runs, answers)
    return Tried(type(module).__name__, checks, reference, seconds)


def unsettle(module: nn.Module) -> None:
    """Move what starts out neutral (scales of 1, biases and gates of 0, statistics), so that a forgotten one shows."""
    stored = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in [*module.parameters(), *(buffer for buffer in module.buffers() if id(buffer) in stored)]:
            if tensor.is_floating_point() and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(torch.rand_like(tensor) * _SPREAD)


def _run(module: nn.Module, args: Sequence[torch.Tensor]) -> ExampleRun:
    run = ExampleRun.of(module, args)
    if not all(np.isfinite(output).all() for output in run.outputs):
        raise ArithmeticError("PyTorch's own results are not finite")
    return run


def _judged(
    module: nn.Module,
    given: Sequence[Sequence[torch.Tensor]],
    sizes: Sequence[Sizes],
    runs: Sequence[ExampleRun],
    answers: Sequence[Sequence[np.ndarray]],
) -> tuple[dict[str, Check], str]:
    names = [", ".join(f"{symbol} = {size}" for symbol, size in each.items()) or "static" for each in sizes]
    names = names if len(set(names)) == len(names) else [f"{name}, {n}" for n, name in enumerate(names, 1)]
    wanted = [run.outputs for run in runs]
    checks = {name: _check(*pair) for name, pair in zip(names, zip(answers, wanted, strict=True), strict=True)}
    if all(check.passed for check in checks.values()):
        return checks, "f32"
    exact = _in_float64(module, given)
    if exact is None:
        return checks, "f32"
    own = max(_distance(*pair) for pair in zip(wanted, exact, strict=True))
    allowed = max(_EXACT, min(AS_FAR_OFF * own, NO_JUDGE))
    second = {name: _check(*pair, allowed) for name, pair in zip(names, zip(answers, exact, strict=True), strict=True)}
    return (second, "f64") if all(check.passed for check in second.values()) else (checks, "f32")


def _check(answers: Sequence[np.ndarray], wanted: Sequence[np.ndarray], allowed: float = _EXACT) -> Check:
    scale = max([1.0, *(float(np.abs(each).max()) for each in wanted if each.size)])
    worst = max(largest_error(*pair) for pair in zip(answers, wanted, strict=True))
    return Check(worst, scale, 0, 0, _distance(answers, wanted) <= allowed)


def _distance(answers: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Return the largest error of all outputs, each as a share of its own largest value."""
    return max(
        largest_error(answer, output) / max(1e-6, float(np.abs(output).max(initial=0)))
        for answer, output in zip(answers, wanted, strict=True)
    )


def _in_float64(module: nn.Module, given: Sequence[Sequence[torch.Tensor]]) -> list[tuple[np.ndarray, ...]] | None:
    """Return what the module says in float64; None where PyTorch cannot."""
    try:
        exact = copy.deepcopy(module).double()
        return [
            tuple(np.asarray(output) for output in ExampleRun.of(exact, [_doubled(each) for each in args]).outputs)
            for args in given
        ]
    except Exception:  # whatever the module's own code raises
        return None


def _doubled(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in twice its precision; whole numbers stay what they are."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


__all__ = ["Tried", "tried", "unsettle"]

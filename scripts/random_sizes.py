#!/usr/bin/env python3
"""Export small random modules with dynamic sizes, and compare each with PyTorch at other sizes than the example's.

usage: scripts/random_sizes.py [--count N] [--seed S] [--sizes K] [--list]

Module number S + i is tests/random_modules.py's of that seed: one to four steps (cuts, pads, joins, pools, comparisons of a
size). The last lines count what became of them: right at every size that PyTorch takes, some sizes refused when run, refused at
export, wrong, engines that died, and engines that did not finish within a minute (tract does not for some nested minima).
--list prints one line for each module that is not right. Exit code 1 when any is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import EngineCrashError, EngineError, EngineTimeoutError, MismatchError, T2NError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from tests.random_modules import RandomModule

AXES = {"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "U"}}
TOLERANCE = 1e-4
ROUNDING = 1e-6  # of the largest value
RIGHT, RUN, EXPORT, WRONG, DIED, ENDLESS, UNTOLD = (
    "right",
    "some sizes refused when run",
    "refused at export",
    "wrong",
    "engine died",
    "engine did not finish",
    "other error",
)
_SECONDS = 60


class _InAMinute(TractNNEF):
    """The newest tract, which has a minute for each load and run."""

    def _wheel(self) -> TractWheel:
        return TractWheel(timeout_seconds=_SECONDS)


def judged(module: RandomModule, count: int) -> tuple[str, str]:
    """Return what became of a module, and a line that says why."""
    example = module.inputs(module.example_sizes)
    try:
        with torch.no_grad():
            module(*example)
    except (RuntimeError, IndexError):
        return "", ""  # PyTorch does not take the example
    with tempfile.TemporaryDirectory() as folder:
        try:
            archive = export_model_to_nnef(
                module,
                example,
                Path(folder) / "m",
                _InAMinute(dynamic_axes=AXES),
                input_names=["x", "y"],
                compression_level=None,
            )
        except MismatchError as error:
            return EXPORT, f"mismatch {error}"
        except EngineCrashError as error:
            return DIED, str(error)
        except EngineTimeoutError as error:
            return ENDLESS, str(error)
        except T2NError as error:
            return EXPORT, str(error)
        except Exception as error:
            return UNTOLD, f"{type(error).__name__}: {error}"
        try:
            return _compared(module, archive, count)
        except EngineError as error:
            return DIED, f"at the load: {error}"


def _compared(module: RandomModule, archive: Path, count: int) -> tuple[str, str]:
    refused = ""
    with TractWheel(timeout_seconds=_SECONDS).load(archive) as engine:
        for sizes in module.other_sizes(count):
            inputs = module.inputs(sizes)
            expected = _expected(module, inputs)
            if expected is None:
                continue
            try:
                (answer,) = engine.run([each.numpy() for each in inputs])
            except EngineCrashError as error:
                return DIED, f"{sizes}: {error}"
            except EngineTimeoutError as error:
                return ENDLESS, f"{sizes}: {error}"
            except EngineError as error:
                refused = f"{sizes}: {error}"
                continue
            if answer.shape != expected.shape or not _close(answer, expected):
                return WRONG, f"{sizes}: {answer.shape} for {expected.shape}"
    return (RUN, refused) if refused else (RIGHT, "")


def _close(answer: np.ndarray, expected: np.ndarray) -> bool:
    """Compare values; sums of large ones of both signs are small, and as exact as the large ones."""
    exact = max(TOLERANCE, ROUNDING * float(np.abs(expected).max()))
    return np.allclose(answer, expected, atol=exact, rtol=TOLERANCE)


def _expected(module: RandomModule, inputs: Sequence[torch.Tensor]) -> np.ndarray | None:
    """Return what PyTorch says; None for sizes that it does not take, and for a result without elements."""
    try:
        with torch.no_grad():
            expected: np.ndarray = module(*inputs).numpy()
    except (RuntimeError, IndexError):
        return None
    return expected if expected.size else None


def main() -> int:
    """Run the modules; return 1 when one is wrong or kills the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, default=10)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        module = RandomModule(seed).eval()
        kind, why = judged(module, options.sizes)
        if not kind:
            continue
        counts[kind] += 1
        plain[kind] += not module.has_branches
        if options.list and kind != RIGHT:
            print(f"{seed}\t{kind}\t{module.text}\t{' '.join(why.split())[:300]}", flush=True)
    total, without = sum(counts.values()), sum(plain.values())
    for kind in (RIGHT, RUN, EXPORT, WRONG, DIED, ENDLESS, UNTOLD):
        print(f"{kind}: {counts[kind]} of {total}; without branches {plain[kind]} of {without}")
    return 1 if counts[WRONG] or counts[DIED] or counts[UNTOLD] else 0


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

"""What one thread of this machine can do at most: bytes read from memory, and f32 operations, in a second.

Run as a program (`python -m t2n_llm.bench.machine_limits`), it measures and prints one JSON object. It is a process of its own
since numpy's BLAS reads the number of threads when it is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from generic_export.errors import EngineRunError

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM")}
_VALUES = 1 << 26  # f32, 256 MB: more than any cache holds
_SIDE = 1024
_REPEATS = 5
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class MachineLimits:
    """The best of a few runs of a sum over memory, and of a product of matrices.

    Attributes:
        bytes_per_second: read by one thread.
        flops_per_second: of f32, by one thread; a multiplication and an addition are two.
    """

    bytes_per_second: float
    flops_per_second: float


def measured_limits() -> MachineLimits:
    """Measure in a child process, about a second.

    Raises:
        EngineRunError: the child failed.
    """
    command = [sys.executable, "-m", __name__]
    try:
        child = subprocess.run(
            command, env={**os.environ, **_ONE_THREAD}, capture_output=True, timeout=_TIMEOUT_SECONDS, check=True
        )
        return MachineLimits(**json.loads(child.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise EngineRunError(f"the limits of this machine could not be measured: {error}.") from None


def _limits_here() -> MachineLimits:
    import numpy as np

    block = np.ones(_VALUES, np.float32)
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    return MachineLimits(
        bytes_per_second=block.nbytes / _best(lambda: np.dot(block, block)),
        flops_per_second=2 * _SIDE**3 / _best(lambda: matrix @ matrix),
    )


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_limits_here())))

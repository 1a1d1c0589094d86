"""`EngineTarget`: a target whose archives are run here, as checks and the evidence about a failed one see it.

In: an archive and what PyTorch answered. Out: what the engine answers, and how close that is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from generic_export.compare.comparison import Comparison, ToleranceLimits, TractCheckTolerance, compare
from generic_export.errors import MismatchError
from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.version import SemanticVersion

_NEAR = 0.05  # half precision, and sums in another order, are nearer


class EngineTarget(InferenceTarget, ABC):
    """What is asked of a target about its engine.

    Attributes:
        check_io_tolerance: how close the engine's outputs must be to PyTorch's.
        check_io_sizes: where the archive is compared beside the example's sizes; None chooses.
    """

    check_io_tolerance: TractCheckTolerance | ToleranceLimits
    check_io_sizes: Sequence[Mapping[str, int]] | None

    @property
    @abstractmethod
    def release(self) -> SemanticVersion:
        """The tract release that will read the archive."""

    @property
    @abstractmethod
    def registries(self) -> tuple[str, ...]:
        """The registries that an engine must enable, beside its core."""

    @abstractmethod
    def ask(self, archive: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run an archive in the engine of this target's release, with this target's registries.

        Args:
            archive: the archive.
            inputs: one array per input, in order.
        Returns:
            One array per output, in order. The command gives f16 back as f32.
        """

    @contextmanager
    def opened(self, archive: Path) -> Iterator[Callable[[Sequence[np.ndarray]], list[np.ndarray]]]:
        """Yield what runs an archive, as `ask` does, for several runs."""
        yield partial(self.ask, archive)

    def compared(self, example: ExampleRun, answers: Sequence[np.ndarray]) -> list[Comparison]:
        """Compare an engine's answers with PyTorch's within `check_io_tolerance`, output by output.

        Raises:
            MismatchError: the engine has another number of outputs.
        """
        if len(answers) != len(example.outputs):
            raise MismatchError(f"tract gives {len(answers)} outputs, PyTorch {len(example.outputs)}.")
        return [
            compare(name, _as_stored(answer, reference), reference, self.check_io_tolerance.limits(reference.dtype))
            for name, answer, reference in zip(example.output_names, answers, example.outputs, strict=True)
        ]

    def require_close(self, archive: Path, example: ExampleRun, answers: Sequence[np.ndarray]) -> list[Comparison]:
        """Return how close the answers are.

        Raises:
            MismatchError: an output is beyond `check_io_tolerance`; says which ones, where and how much.
        """
        comparisons = self.compared(example, answers)
        failed = [comparison for comparison in comparisons if not comparison.passed]
        if failed:
            raise MismatchError(
                f"{archive}: {len(failed)} of {len(comparisons)} outputs of tract differ from PyTorch beyond tolerance "
                f"'{self.check_io_tolerance}': " + "; ".join(map(str, failed)),
                _advice(failed),
            )
        return comparisons


def _advice(failed: Sequence[Comparison]) -> str:
    """Say what to do about outputs that differ: a wider tolerance helps where they are near, and hides a fault elsewhere."""
    if all(comparison.max_rel_error <= _NEAR or comparison.max_abs_error <= _NEAR for comparison in failed):
        return "Export in float32, or choose a wider check_io_tolerance if the difference is expected."
    return "This is no matter of rounding: debug_bundle_path names the first tensor that differs, and the module that makes it."


def _as_stored(answer: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Undo what npz does to f16: the command writes it as f32, exactly."""
    widened = answer.dtype == np.float32 and reference.dtype == np.float16
    return answer.astype(np.float16) if widened else answer


__all__ = ["EngineTarget"]

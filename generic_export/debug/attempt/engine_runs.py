"""The engine's side of an attempt: the archive of a piece is loaded, run on every call, and compared with PyTorch.

In: an archive and the arrays of its calls. Out: comparisons; a failure is followed to the operator that makes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from generic_export.compare.comparison import Comparison, MeasuredTolerance, ToleranceLimits
from generic_export.debug.archive.bisect import Provenance, first_divergence, first_failure
from generic_export.debug.attempt.locate import LocatedError
from generic_export.debug.attempt.piece_module import PieceModule
from generic_export.debug.attempt.pytorch_runs import compare_with_reference
from generic_export.debug.record.recording import RecordedCall
from generic_export.debug.records import Stage
from generic_export.errors import EngineError, EngineTimeoutError, MismatchError, T2NError
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engines.asking import ask_cli
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.inference_target.tract.releases.wheels import wheel_packages
from generic_export.inference_target.tract.target import TractNNEF

logger = logging.getLogger(__name__)


class EngineRuns:
    """Runs of a piece's archive in the engine.

    Args:
        target: names the engine.
        tolerance: of the comparison.
        seconds: how long one load or run may take.
        enter: called with each stage before it begins.

    Attributes:
        metrics: the comparisons so far.
        node_count: nodes of the engine's graph; None where the engine does not report them.
    """

    def __init__(
        self, target: TractNNEF, tolerance: MeasuredTolerance, seconds: float, enter: Callable[[Stage], None]
    ) -> None:
        self._target, self._tolerance, self._seconds, self._enter = target, tolerance, seconds, enter
        self.metrics: list[Comparison] = []
        self.node_count: int | None = None

    def check(
        self,
        archive: Path,
        provenance: Provenance,
        module: PieceModule,
        examples: Sequence[tuple[RecordedCall, ExampleRun]],
    ) -> None:
        """Run the archive on every call and compare.

        Args:
            archive: of the piece.
            provenance: what it was made from.
            module: the piece.
            examples: its calls as arrays.

        Raises:
            LocatedError: the engine refuses the archive at an operator, or an output differs.
            EngineError: the engine refuses it whatever its outputs are, or takes too long.
        """
        self._enter(Stage.LOAD)
        try:
            answers = self._ask_all(archive, [example.inputs for _, example in examples])
        except EngineTimeoutError:
            raise
        except EngineError as error:
            found = first_failure(archive, provenance, examples[0][1], self._ask)
            if found is None:
                raise
            raise LocatedError(error, found.operator, found.module_path, found.source) from error
        self._enter(Stage.COMPARE)
        wrong: list[tuple[float, ExampleRun, Comparison]] = []
        for (call, example), answer in zip(examples, answers, strict=True):
            for comparison in compare_with_reference(self._tolerance, module, call, example, answer):
                self.metrics.append(comparison)
                if not comparison.passed:
                    wrong.append((comparison.share_of_allowed, example, comparison))
        if wrong:
            _, example, worst = max(wrong, key=lambda item: item[0])
            mismatch = MismatchError(
                f"{type(module).__name__}: {worst}",
                "Compare the translation of this operator with PyTorch's computation.",
            )
            raise self._located(mismatch, archive, provenance, example, worst)

    def _located(
        self, error: MismatchError, archive: Path, provenance: Provenance, example: ExampleRun, worst: Comparison
    ) -> LocatedError:
        """Return an error with the operator that computes the first differing tensor."""
        limit = worst.allowed / max(worst.rms, 1.0)
        try:
            found = first_divergence(archive, provenance, example, self._ask, ToleranceLimits(limit, 0.0))
        except T2NError as search:
            logger.info("the first differing tensor was not found: %s", search)
            found = None
        return LocatedError(error, found.operator, found.module_path, found.source) if found else LocatedError(error)

    def _ask_all(self, archive: Path, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        if self._target.specific_tract_binary_path:
            self._enter(Stage.RUN)
            return [self._ask(archive, arrays) for arrays in inputs]
        with self._wheel().load(archive, registries=self._target.registries) as model:
            self._enter(Stage.RUN)
            self.node_count = _node_count(model)
            return [model.run(list(arrays)) for arrays in inputs]

    def _ask(self, archive: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        target = self._target
        if target.specific_tract_binary_path:
            cli = TractCli(Path(str(target.specific_tract_binary_path)))
            return ask_cli(cli, archive, inputs, registries=target.registries)
        with self._wheel().load(archive, registries=target.registries) as model:
            return model.run(list(inputs))

    def _wheel(self) -> TractWheel:
        return TractWheel(timeout_seconds=self._seconds, packages=wheel_packages(self._target.release))


def _node_count(model: WheelModel) -> int | None:
    """Return how many nodes the engine's graph has; None for a release that does not report it."""
    try:
        return len(model.dump())
    except EngineError:
        return None


__all__ = ["EngineRuns"]

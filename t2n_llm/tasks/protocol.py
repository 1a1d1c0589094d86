"""What a task is: from a model's skeleton to its check. One file or folder a task; `registry` names them.

In: a source and the choices of an export. Out: graphs to write, and a report on the archives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from generic_export.errors import MissingTensorError
from generic_export.nnef.graph import NnefGraph
from kvcache.states.tensors import StateTensor
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.options import CheckingOptions
from t2n_llm.compress.calibration import Calibration, TextCalibration
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import RangeRequest, Ranges
from t2n_llm.reporter import Reporter
from t2n_llm.source.adapter import Adapter
from t2n_llm.source.empty_model import Weightless
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.archive_weights import ArchiveWeights

MODEL_ROLE = "model"
"""What the archive of a task with a single one is called."""


@dataclass(frozen=True)
class TaskGraph:
    """One archive before its weights are read.

    Attributes:
        skeleton: the model it is captured from.
        graph: the document.
        role: what the archive is called.
        states: what is fed back from output to input.
        engine_states: what the engine keeps by itself.
        ranges: what was measured of its f16 tensors; None where nobody looked.
        from_checkpoint: whether its tensors are weights; those of a front end are constants of its skeleton, stored as they are.
    """

    skeleton: Weightless
    graph: NnefGraph
    role: str = MODEL_ROLE
    states: tuple[StateTensor, ...] = ()
    engine_states: tuple[StateTensor, ...] = ()
    ranges: Ranges | None = None
    from_checkpoint: bool = True

    @property
    def parameters(self) -> int:
        """How many values are stored."""
        return sum(prod(variable.shape) for variable in self.graph.variables)


@dataclass(frozen=True)
class CheckSubject:
    """An export that is to be compared with PyTorch: just written, or a folder opened again.

    Attributes:
        source: the model it was made from.
        network: that model without weights.
        archives: by role, in the order in which they run; the last is the one that a runtime decodes with.
        options: what decided the graph.
        symbols: of the last archive.
        states: of the last archive.
        needed: says which parameters the checkpoint must have.
        checking: engine, length, where the reference's weights may stay.
        tolerance: what counts as agreement.
        reporter: told what happens.
        with_text: whether the source's tokenizer makes the texts.
        adapter: merged into the weights, or None.
        overrides: the values of compressed tensors, or None.
        bundles: folder to be made for test bundles; None writes none.
    """

    source: ModelSource
    network: nn.Module
    archives: Mapping[str, Path]
    options: GraphOptions
    symbols: Sequence[str]
    states: tuple[StateTensor, ...]
    needed: Callable[[], frozenset[str]]
    checking: CheckingOptions
    tolerance: Tolerance
    reporter: Reporter
    with_text: bool = True
    adapter: Adapter | None = None
    overrides: ArchiveWeights | None = None
    bundles: Path | None = None

    @property
    def archive(self) -> Path:
        """The archive that a runtime decodes with."""
        return list(self.archives.values())[-1]

    @cached_property
    def tokenizer(self) -> Any | None:
        """The source's tokenizer; None where texts are random."""
        return self.source.tokenizer() if self.with_text else None

    def announce(self, check: str) -> None:
        """Tell which check begins."""
        self.reporter.stage(f"Checking in tract: {check}")


class Task(ABC):
    """A kind of model."""

    name: str
    """The hub's pipeline tag."""

    diagnosed = False
    """Whether `t2n-llm diagnose` looks at the same graph."""

    reads_text = True
    """Whether a source has a tokenizer."""

    def refuse(
        self, source: ModelSource, options: GraphOptions, compression: CompressionOptions, adapter: str | None
    ) -> None:
        """Refuse what the task cannot be combined with, before anything is captured.

        Raises:
            OptionError: the message says what.
        """
        del source, options, compression, adapter

    def refuse_check(
        self,
        graphs: Sequence[TaskGraph],
        source: ModelSource,
        compression: CompressionOptions,
        checking: CheckingOptions,
    ) -> None:
        """Refuse a check that cannot run, before anything is written.

        Raises:
            NotEnoughMemoryError: the PyTorch reference does not fit.
        """
        del graphs, source, compression, checking

    @abstractmethod
    def graphs(
        self, source: ModelSource, options: GraphOptions, ranges: RangeRequest | None = None
    ) -> tuple[TaskGraph, ...]:
        """Capture and translate: one graph an archive, in the order they run; no weight is read unless ranges are measured.

        Args:
            source, options: what is exported, and how.
            ranges: has f16 activations measured on the weights, and made to fit, where the task can; None: nobody looks.

        Raises:
            UnknownArchitectureError, CaptureError, TranslationError: the model cannot be expressed.
            NumericRangeError: f16 does not hold its activations.
        """

    @abstractmethod
    def network(self, source: ModelSource) -> nn.Module:
        """Return the model without weights that the check runs with weights."""

    @abstractmethod
    def check(self, subject: CheckSubject) -> ValidationReport:
        """Compare the archives with PyTorch, in the engine.

        Raises:
            EngineError: the engine refused an archive, or died.
        """

    @abstractmethod
    def interface(self, source: ModelSource, graphs: Sequence[TaskGraph], options: GraphOptions) -> dict[str, Any]:
        """Return what `export.json` says of the archives as they are stored: `graph`, `model`, and what is the task's own."""

    def calibration(self, source: ModelSource, data: str) -> Calibration:
        """Return how the model is run for algorithms that look at what its layers read.

        Args:
            source: the model.
            data: what a user calls the data, see `CompressionOptions`.
        """
        return TextCalibration(source, data)

    def explained(self, error: MissingTensorError, graph: TaskGraph) -> MissingTensorError:
        """Return an error about a checkpoint that lacks a tensor, in the task's words."""
        del graph
        return error

    def bundle_bytes(self, graphs: Sequence[TaskGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """Return about how many bytes the test bundles take."""
        del graphs, options, checking
        return 0

    def check_bytes(self, graphs: Sequence[TaskGraph], stored_bytes: int, checking: CheckingOptions) -> int:
        """Return the most memory that the check takes: the reference in f32 and the archives in the engine."""
        del checking
        shapes = {variable.label: variable.shape for each in graphs for variable in each.graph.variables}
        return 4 * sum(map(prod, shapes.values())) + stored_bytes


__all__ = ["MODEL_ROLE", "CheckSubject", "Task", "TaskGraph"]

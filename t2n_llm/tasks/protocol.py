"""What a task is: from a model without weights to its check. One file or folder a task; `registry` names them.

In: a source and the choices of an export. Out: graphs to write, the outputs of PyTorch, and a report on the archives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.errors import MissingTensorError, OptionError
from kvcache.states.tensors import Slot, StateTensor
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.options import CheckingOptions
from t2n_llm.compress.calibration import Calibration, TextCalibration
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.reporter import Reporter
from t2n_llm.source.adapter import Adapter
from t2n_llm.source.empty_model import ModelKind
from t2n_llm.source.hub import ModelSource
from t2n_llm.weights.archive_weights import ArchiveWeights
from t2n_llm.weights.f32_model import dequantized, eager_model, refuse_invented
from t2n_llm.weights.placement import require_memory


@dataclass(frozen=True)
class ReferenceAnswers:
    """The outputs of PyTorch in f32.

    Attributes:
        answers: the task's own record, which its `check` reads.
        largest_states: largest magnitude of each float state, by slot; empty for a task without states.
    """

    answers: Any
    largest_states: Mapping[Slot, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckSubject:
    """What is compared with PyTorch: an export that is being made, or a folder opened again.

    Attributes:
        source: the model it was made from.
        network: that model without weights.
        options: what decided the graph.
        symbols: of the last archive.
        needed: returns the parameters that the checkpoint must have.
        checking: engine, length, where the reference's weights may stay.
        tolerance: limits of agreement.
        reporter: receives the progress.
        with_text: whether the source's tokenizer makes the texts.
        adapter: merged into the weights, or None.
        overrides: values of compressed tensors for the reference, or None.
        decodes: whether the reference generates tokens too; False runs the text alone, for ranges and comparisons.
        archives: by role, in the order in which they run; the last is the one that a runtime decodes with. `check` reads them.
        states: of the last archive.
        bundles: folder to be made for test bundles; None writes none.
    """

    source: ModelSource
    network: nn.Module
    options: GraphOptions
    symbols: Sequence[str]
    needed: Callable[[], frozenset[str]]
    checking: CheckingOptions
    tolerance: Tolerance
    reporter: Reporter
    with_text: bool = True
    adapter: Adapter | None = None
    overrides: ArchiveWeights | None = None
    decodes: bool = True
    archives: Mapping[str, Path] = field(default_factory=dict)
    states: tuple[StateTensor, ...] = ()
    bundles: Path | None = None

    @property
    def archive(self) -> Path:
        """The archive that a runtime decodes with."""
        return list(self.archives.values())[-1]

    @cached_property
    def tokenizer(self) -> Any | None:
        """The source's tokenizer; None where texts are random."""
        return self.source.tokenizer() if self.with_text else None

    def reference_model(self, kind: ModelKind) -> Any:
        """Return transformers' eager model in f32 with the weights that the archives are compared with, in memory.

        Args:
            kind: the class of transformers; a checkpoint that is quantised takes that of `network`.

        Raises:
            NotEnoughMemoryError: the model does not fit.
            CorruptCheckpointError: transformers had to invent weights that are needed.
        """
        source = self.source
        require_memory(self.network, self.checking.placement)
        if source.quantization is not None:
            model, missing = dequantized(source, type(self.network))
        else:
            model, missing = eager_model(kind, source.folder, source.trust_remote_code)
        refuse_invented(source.name, self.needed().intersection(missing))
        if self.overrides is not None:
            with torch.no_grad():
                self.overrides.apply(model)
        return model

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
        """Refuse what the task cannot be combined with, before anything is captured; the base class refuses adapters.

        Raises:
            OptionError: the message says what.
        """
        del source, options, compression
        if adapter is not None:
            raise OptionError(
                f"--task {self.name} does not merge adapters.",
                "Merge it with peft first, then export the merged model.",
            )

    def refuse_check(
        self,
        graphs: Sequence[ModelGraph],
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
    def graphs(self, source: ModelSource, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """Build and capture one graph for each archive, in the order in which they run; no weight is read.

        Raises:
            UnknownArchitectureError, CaptureError: the model cannot be captured.
        """

    def typical_inputs(
        self, graph: ModelGraph, tokens: Sequence[int], given: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return typical inputs of a graph with values, by name, to measure f16 activations; nothing where there are none.

        Args:
            graph: one of those that `graphs` returned.
            tokens: int64 ids of typical text.
            given: outputs of the graphs before it.
        """
        del graph, tokens, given
        return {}

    def archives(self, graph: ModelGraph, options: GraphOptions) -> tuple[ModelGraph, ...]:
        """Return the graphs that one finished graph is written as, in the order in which they run."""
        del options
        return (graph,)

    @abstractmethod
    def network(self, source: ModelSource) -> nn.Module:
        """Return the model without weights that the check runs with weights."""

    compares_original = False
    """Whether `check` compares a compressed model with the one that it was made from."""

    @abstractmethod
    def reference(self, subject: CheckSubject) -> ReferenceAnswers:
        """Run PyTorch in f32; no archive is needed.

        Raises:
            NotEnoughMemoryError: the model does not fit.
            CorruptCheckpointError: the checkpoint lacks weights that are needed.
        """

    @abstractmethod
    def check(
        self, subject: CheckSubject, reference: ReferenceAnswers, original: ReferenceAnswers | None = None
    ) -> ValidationReport:
        """Compare the archives with PyTorch, in the engine.

        Args:
            subject: with archives.
            reference: of the stored weights.
            original: of the checkpoint's weights, where those that are stored differ.

        Raises:
            EngineError: the engine refused an archive, or died.
        """

    @abstractmethod
    def interface(self, source: ModelSource, graphs: Sequence[ModelGraph], options: GraphOptions) -> dict[str, Any]:
        """Return what `export.json` says of the archives as they are stored: `graph`, `model`, and what is the task's own."""

    def calibration(self, source: ModelSource, data: str) -> Calibration:
        """Return how the model is run for algorithms that look at what its layers read.

        Args:
            source: the model.
            data: what a user calls the data, see `CompressionOptions`.
        """
        return TextCalibration(source, data)

    def explained(self, error: MissingTensorError, graph: ModelGraph) -> MissingTensorError:
        """Return an error about a checkpoint that lacks a tensor, in the task's words."""
        del graph
        return error

    def bundle_bytes(self, graphs: Sequence[ModelGraph], options: GraphOptions, checking: CheckingOptions) -> int:
        """Return about how many bytes the test bundles take."""
        del graphs, options, checking
        return 0

    def check_bytes(self, graphs: Sequence[ModelGraph], stored_bytes: int, checking: CheckingOptions) -> int:
        """Return the most memory that the check takes: the reference in f32 and the archives in the engine."""
        del checking
        shapes = {variable.label: variable.shape for each in graphs for variable in each.document.variables}
        return 4 * sum(map(prod, shapes.values())) + stored_bytes


__all__ = ["CheckSubject", "ReferenceAnswers", "Task"]

"""Which tensor of an archive is the first to differ from PyTorch, found by giving the graph further outputs.

In: a failing archive, the captured graph it was translated from, example inputs, and what asks an engine. Out: `Divergence`.
The engine's intermediates are outputs of the same text; PyTorch's come from running the captured operators one by one.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from generic_export.compare.comparison import Comparison, ToleranceLimits, TractCheckTolerance, compare
from generic_export.errors import EngineError
from generic_export.inference_target.example import ExampleRun, as_array
from generic_export.inference_target.tract.engines.wheel_process import reuse_workers
from generic_export.nnef.graph import NnefGraph, references
from generic_export.read.expansion import flat_text
from generic_export.read.reading import read_graph_text, signature_of, unpack, with_outputs
from generic_export.torch_graph.capture.replay import Stored, replay
from generic_export.torch_graph.ir import TensorVariable, TorchModuleIRGraph
from generic_export.write.archive import GRAPH_FILE

Ask = Callable[[Path, Sequence[np.ndarray]], list[np.ndarray]]
"""Runs an archive on inputs and returns its outputs, in order."""

# How many further outputs one run of the engine is given: fewer runs against more memory.
_PROBES_PER_RUN = 12
_LARGEST_F16 = 65504.0


@dataclass(frozen=True)
class Provenance:
    """What an archive was made from.

    Attributes:
        captured: the captured graph.
        document: its translation; `origins` says which identifier is which captured tensor.
        stored: the parameters, buffers and constants by name.
    """

    captured: TorchModuleIRGraph
    document: NnefGraph
    stored: Stored


@dataclass(frozen=True)
class Suspect:
    """A tensor at which the engine and PyTorch part.

    Attributes:
        tensor: identifier in `graph.nnef`.
        captured: name of the captured tensor that it should be.
        module_path, module_type: the module whose forward makes it ("" for the root).
        operator: the PyTorch operator that makes it.
        source: `file.py:line` in the user's model, when PyTorch recorded it.
    """

    tensor: str
    captured: str
    module_path: str
    module_type: str
    operator: str
    source: str

    def __str__(self) -> str:
        kind = f" ({self.module_type})" if self.module_type else ""
        source = f", {self.source}" if self.source else ""
        return f"{self.tensor!r}, which {self.operator} makes in module {self.module_path or '(root)'}{kind}{source}"


@dataclass(frozen=True)
class Divergence(Suspect):
    """The first tensor that differs, while everything it is computed from agrees.

    Attributes:
        comparison: how it differs.
        agreeing: identifiers of the tensors it is computed from, which agree.
        values: what the engine and PyTorch have.
    """

    comparison: Comparison
    agreeing: tuple[str, ...]
    values: tuple[np.ndarray, np.ndarray] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Failure(Suspect):
    """The first tensor that the engine cannot compute, while it computes everything before it in the graph.

    Attributes:
        reason: what the engine said.
    """

    reason: str


def first_failure(archive: Path, translation: Provenance, example: ExampleRun, ask: Ask) -> Failure | None:
    """Find the first tensor of an archive at which the engine stops, by giving the graph fewer outputs.

    Args:
        archive, translation, example, ask: as in `first_divergence`.

    Returns:
        None when the engine refuses the graph whatever its outputs are, or refuses it no more.

    Raises:
        ArchiveError: the archive cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder, reuse_workers():
        # Outputs are all that is asked for here, so no tolerance plays a part.
        probe = _Probe(unpack(archive, Path(folder) / "archive"), translation, example, ask, ToleranceLimits())
        works, fails = 1, len(probe.order)
        if not fails or probe.refusal(probe.order) is None or probe.refusal(probe.order[:1]) is not None:
            return None
        while fails - works > 1:
            middle = (works + fails) // 2
            refusal = probe.refusal(probe.order[:middle])
            works, fails = (middle, fails) if refusal is None else (works, middle)
        reason = probe.refusal(probe.order[:fails]) or ""
        return probe.failure(probe.order[fails - 1], reason)


def first_divergence(
    archive: Path,
    translation: Provenance,
    example: ExampleRun,
    ask: Ask,
    tolerance: TractCheckTolerance | ToleranceLimits,
) -> Divergence | None:
    """Find the first tensor of an archive that differs from PyTorch.

    Args:
        archive: the archive, as it was checked; its identifiers are those of `translation`.
        translation: what it was made from.
        example: inputs, and PyTorch's outputs.
        ask: the engine.
        tolerance: how close is close; between inputs and outputs `absolute` is relative to a tensor's own magnitude.

    Returns:
        None when nothing differs once the intermediate tensors are outputs too: then the engine's optimiser is suspect.

    Raises:
        ArchiveError: the archive cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder, reuse_workers():
        probe = _Probe(unpack(archive, Path(folder) / "archive"), translation, example, ask, tolerance)
        suspects = [name for name in probe.order if name in probe.outputs and probe.differs([name])]
        if not suspects:
            return None
        suspect = suspects[0]
        while True:
            suspect = _first_on_the_way(probe, suspect)
            parents = probe.parents(suspect)
            differing = probe.differs(parents)
            if not differing:
                return probe.divergence(suspect, parents)
            suspect = differing[0]


def _first_on_the_way(probe: _Probe, suspect: str) -> str:
    """Narrow the tensors that a differing one depends on, in the graph's order, to the first that differs."""
    line = [*probe.ancestors(suspect), suspect]
    while len(line) > 1:
        count = min(_PROBES_PER_RUN, len(line) - 1)
        points = sorted({(index + 1) * (len(line) - 1) // (count + 1) for index in range(count)})
        asked = [line[point] for point in points]
        differing = set(probe.differs(asked))
        bad = next((point for point in points if line[point] in differing), len(line) - 1)
        unknown = {name for name in line if probe.is_unknown(name)}
        good = max((point for point in points if point < bad and line[point] not in unknown), default=-1)
        narrowed = [name for name in line[good + 1 : bad + 1] if name not in unknown]
        line = narrowed if len(narrowed) < len(line) else line[-1:]
    return line[0]


class _Probe:
    """Asks both sides for tensors by their identifiers and remembers the comparisons."""

    def __init__(
        self,
        folder: Path,
        translation: Provenance,
        example: ExampleRun,
        ask: Ask,
        tolerance: TractCheckTolerance | ToleranceLimits,
    ) -> None:
        self._folder = folder
        self._translation = translation
        self._example = example
        self._ask = ask
        self._tolerance = tolerance
        self._text = flat_text(read_graph_text(folder))
        self.outputs = signature_of(self._text).outputs
        self._captured = self._comparable()
        self._makers = {name: op for op in translation.document.operations for name in op.outputs}
        self.order = [name for op in translation.document.operations for name in op.outputs if name in self._captured]
        self._position = {name: index for index, name in enumerate(self.order)}
        self._comparisons: dict[str, Comparison | None] = {}

    def _comparable(self) -> dict[str, str]:
        """Return the captured tensor behind each identifier that the text assigns, results of operators only."""
        assigned = set(re.findall(r"\w+", " ".join(re.findall(r"^\s*(.+?)\s=\s", self._text, re.MULTILINE))))
        results = {variable.name for variable in _results(self._translation.captured)}
        found: dict[str, str] = {}
        for identifier, captured in self._translation.document.origins:
            if captured in results and identifier in assigned:
                found.setdefault(identifier, captured)
        by_output = zip(self.outputs, self._translation.captured.outputs, strict=False)
        found.update({name: variable.name for name, variable in by_output if variable.name in results})
        return found

    def is_unknown(self, name: str) -> bool:
        """Say whether a tensor was asked for and one of the sides could not give it."""
        return self._comparisons.get(name, True) is None

    def differs(self, names: Sequence[str]) -> list[str]:
        """Return those of some tensors that differ, in the graph's order."""
        new = [name for name in names if name not in self._comparisons]
        for start in range(0, len(new), _PROBES_PER_RUN):
            self._look(new[start : start + _PROBES_PER_RUN])
        compared = {name: self._comparisons[name] for name in names}
        found = [name for name, comparison in compared.items() if comparison is not None and not comparison.passed]
        return sorted(found, key=self._position.__getitem__)

    def ancestors(self, name: str) -> list[str]:
        """Return every comparable tensor that one depends on, in the graph's order."""
        return self._upstream(name, lambda source: False)

    def parents(self, name: str) -> list[str]:
        """Return the nearest comparable tensors that one is computed from, past those that no side can give."""
        return [
            source
            for source in self._upstream(name, lambda source: not self._is_lost(source))
            if not self._is_lost(source)
        ]

    def _upstream(self, name: str, is_end: Callable[[str], bool]) -> list[str]:
        """Return the comparable tensors that one depends on, in the graph's order, none beyond an end."""
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            maker = self._makers.get(waiting.pop())
            for source in references(maker) if maker is not None else ():
                if source in seen:
                    continue
                seen.add(source)
                comparable = source in self._position
                if comparable:
                    found.add(source)
                if not (comparable and is_end(source)):
                    waiting.append(source)
        return sorted(found, key=self._position.__getitem__)

    def _is_lost(self, name: str) -> bool:
        self.differs([name])
        return self.is_unknown(name)

    def divergence(self, name: str, agreeing: Sequence[str]) -> Divergence:
        """Return all there is to say about a tensor that differs."""
        engine, torch_side = self._values([name])
        comparison = self._compare(name, engine[name], torch_side[name])
        return Divergence(*self._origin(name), comparison, tuple(agreeing), (engine[name], torch_side[name]))

    def failure(self, name: str, reason: str) -> Failure:
        """Return all there is to say about a tensor that the engine cannot compute."""
        return Failure(*self._origin(name), reason)

    def _origin(self, name: str) -> tuple[str, str, str, str, str, str]:
        captured = self._captured[name]
        op = self._translation.captured.producers()[captured]
        return name, captured, op.module_path, op.module_type, str(op.target), op.source

    def refusal(self, outputs: Sequence[str]) -> str | None:
        """Run the archive with these outputs alone; returns why the engine does not, or None."""
        (self._folder / GRAPH_FILE).write_text(with_outputs(self._text, outputs), encoding="utf-8")
        try:
            self._ask(self._folder, self._example.inputs)
        except EngineError as error:
            return error.message
        return None

    def _look(self, names: Sequence[str]) -> None:
        engine, torch_side = self._values(names)
        for name in names:
            self._comparisons[name] = None
            if name in engine and name in torch_side:
                self._comparisons[name] = self._compare(name, engine[name], torch_side[name])

    def _compare(self, name: str, engine: np.ndarray, torch_side: np.ndarray) -> Comparison:
        answer, reference = _alike(engine, torch_side)
        return compare(name, answer, reference, self._limits(name, reference))

    def _limits(self, name: str, reference: np.ndarray) -> ToleranceLimits:
        """Return the limits for a tensor; for one that is no output `absolute` scales with the tensor's magnitude."""
        if reference.dtype.kind != "f":
            return ToleranceLimits()
        limits = self._tolerance.limits(reference.dtype)
        if name in self.outputs or not reference.size:
            return limits
        finite = np.where(np.isfinite(reference), np.abs(reference.astype(np.float64)), 0.0)
        magnitude = float(np.sqrt(np.mean(np.square(np.minimum(finite, _LARGEST_F16)))))
        return ToleranceLimits(limits.absolute * magnitude, limits.relative, limits.outliers)

    def _values(self, names: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        captured = {name: self._captured[name] for name in names}
        dtypes = [variable.dtype for variable in self._translation.captured.inputs]
        inputs = self._example.input_tensors(dtypes)
        tensors = replay(self._translation.captured, inputs, self._translation.stored, set(captured.values()))
        torch_side = {name: as_array(tensors[tensor]) for name, tensor in captured.items() if tensor in tensors}
        return self._engine_values(names), torch_side

    def _engine_values(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Run the archive with further outputs; where the engine refuses one of them, one by one."""
        outputs = list(dict.fromkeys([*self.outputs, *names]))
        (self._folder / GRAPH_FILE).write_text(with_outputs(self._text, outputs), encoding="utf-8")
        try:
            return dict(zip(outputs, self._ask(self._folder, self._example.inputs), strict=True))
        except EngineError:
            if len(names) <= 1:
                return {}
        return {name: value for single in names for name, value in self._engine_values([single]).items()}


def _results(graph: TorchModuleIRGraph) -> list[TensorVariable]:
    return [variable for op in graph.ops for variable in op.outputs if variable is not None]


def _alike(answer: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both in one float type: the command gives f16 back as f32, and some values are kept wider in the graph."""
    if answer.dtype != reference.dtype and answer.dtype.kind == reference.dtype.kind == "f":
        narrow = min(answer.dtype, reference.dtype, key=lambda dtype: dtype.itemsize)
        return answer.astype(narrow), reference.astype(narrow)
    return answer, reference


__all__ = ["Ask", "Divergence", "Failure", "Provenance", "first_divergence", "first_failure"]

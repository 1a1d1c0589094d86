"""One piece through all rooms: captured, translated, written, loaded, run on every recorded input set, compared.

In: a `Case` and `AttemptOptions`. Out: a `Verdict`, whatever happens. Runs in a worker process (`worker.py`) that may die;
`reached` is told each stage before it begins. The module may be changed here: the process has its own copy of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.capture import Prepared, as_stored, evaluation_mode, prepare
from generic_export.compare.comparison import Comparison, MeasuredTolerance, ToleranceLimits
from generic_export.debug.archive.bisect import Provenance, first_divergence, first_failure
from generic_export.debug.attempt.locate import error_record, model_line, operator_in, source_in
from generic_export.debug.attempt.piece_module import (
    PIECE,
    PieceModule,
    calls_for,
    compared,
    fill_with_random,
    piece_module,
    random_like,
)
from generic_export.debug.privacy import redacted
from generic_export.debug.record.pieces import Case
from generic_export.debug.record.recording import RecordedCall
from generic_export.debug.records import Outcome, Stage, Verdict
from generic_export.documents import producer_properties, translate_graph, with_tensors
from generic_export.errors import CaptureError, EngineError, EngineTimeoutError, MismatchError, T2NError
from generic_export.inference_target.example import ExampleRun, as_array
from generic_export.inference_target.tract.engines.asking import ask_cli
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from generic_export.inference_target.tract.engines.wheel_process import reuse_workers
from generic_export.inference_target.tract.releases.wheels import wheel_packages
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.capture.quantised_modules import spelled_out
from generic_export.torch_graph.dims import Dim
from generic_export.torch_graph.fusion import Fusion
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.naming import identifier
from generic_export.translate.registry import is_translated
from generic_export.translate.translate import TranslationOptions
from generic_export.write.document import write_document

logger = logging.getLogger(__name__)

Reached = Callable[[Stage], None]

# The engine's switches for models in half precision, by what they say on the command line of an export.
F32_SWITCHES: Mapping[str, str] = {
    "force_norm_in_f32": "norms in f32 (TractNNEF(force_norm_in_f32=True))",
    "force_attention_inner_in_f32": "attention in f32 (TractNNEF(force_attention_inner_in_f32=True))",
    "force_linear_accumulation_in_f32": "products accumulated in f32 (TractNNEF(force_linear_accumulation_in_f32=True))",
}


class NonDeterministicError(CaptureError):
    """The same inputs give other outputs the second time."""


@dataclass(frozen=True)
class AttemptOptions:
    """What an attempt is made with.

    Attributes:
        target: its dynamic axes are replaced by the inferred ones.
        fusions: recognisers beside the standard ones.
        torchscript: capture what torch.export refuses through its script or trace, as `export_model_to_nnef` does.
        tolerance: of the comparison.
        isolated: the piece's children are not run, see `piece_module.py`.
        dynamic: axes that vary between calls stay symbolic; False tries the piece as its first call has it.
        folder: where the archive is written.
        engine_seconds: how long one load or run may take in the engine.
        materialise_bytes: a piece without weights (meta device) gets random ones up to this size.
        suggest: try the f32 switches when a piece in half precision is off.
    """

    target: TractNNEF
    folder: Path
    fusions: tuple[Fusion, ...] = ()
    torchscript: bool = True
    tolerance: MeasuredTolerance = field(default_factory=MeasuredTolerance)
    isolated: bool = False
    dynamic: bool = True
    engine_seconds: float = 120.0
    materialise_bytes: int = 1 << 31
    suggest: bool = True


@dataclass
class _AttemptError(Exception):
    """An attempt ends here; carries what the verdict says beyond the error."""

    error: BaseException
    operator: str = ""
    module_path: str = ""
    source: str = ""
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Reference:
    """What PyTorch answers to a call."""

    call: RecordedCall
    outputs: Mapping[str, torch.Tensor]


class Attempt:
    """One try; used once."""

    def __init__(self, case: Case, options: AttemptOptions, reached: Reached = lambda _stage: None) -> None:
        self.case = case
        self.options = options
        self._reached = reached
        self._stage = Stage.CAPTURE
        self._marks: list[tuple[Stage, float]] = []
        self.notes: list[str] = list(case.piece.notes)
        self.metrics: list[Comparison] = []
        self.suggestions: tuple[str, ...] = ()
        self.engine_nodes: int | None = None

    def run(self) -> Verdict:
        """Try the piece."""
        began = time.perf_counter()
        failure: _AttemptError | None = None
        try:
            with evaluation_mode(self.case.module), torch.no_grad(), reuse_workers():
                self._rooms()
        except _AttemptError as found:
            failure = found
        except Exception as error:  # whatever the model's or PyTorch's code raises is the verdict
            failure = _AttemptError(error)
        return self._verdict(failure, time.perf_counter() - began)

    # --- the rooms ----------------------------------------------------------------------------------

    def _rooms(self) -> None:
        self._enter(Stage.CAPTURE)
        self._prepare_weights()
        calls = [self._plain(call) for call in calls_for(self.case, dynamic=self.options.dynamic)]
        module = piece_module(self.case, calls[0], opaque=self.options.isolated)
        meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.leaves(calls[0]).values()))
        references = [] if meta else self._references_if_possible(module, calls)
        with spelled_out(module):
            prepared = self._prepared(module, list(references[0].outputs) if references else None)
            document = self._translated(prepared.graph)
            if not references:
                self.notes.append("there is nothing to compare with: not written or run")
                return
            self._enter(Stage.WRITE)
            document, sources = with_tensors(document, prepared.sources)
            path = self.options.folder / "model"
            archive = write_document(path, document, sources, compression_level=None, overwrite=True).path
            provenance = Provenance(prepared.graph, document, prepared.stored)
            self._check(archive, provenance, module, self._examples(module, provenance, references))

    def _prepared(self, module: PieceModule, output_names: Sequence[str] | None) -> Prepared:
        """Capture the piece as an export captures a module.

        Args:
            module: the piece.
            output_names: None where the piece was not run here.
        """
        self._enter(Stage.CAPTURE)
        names = [part.name for part in module.feed.parts]
        axes = module.dynamic_axes(dynamic=self.options.dynamic)
        if output_names is None and not self.options.isolated:
            recorded = self.case.calls[0]
            output_names = [*recorded.results, *(f"out_{name}" for name in recorded.extra)]
        prepared = prepare(
            module,
            module.examples(dynamic=self.options.dynamic),
            replace(self.options.target, dynamic_axes=axes, check_io=False),
            names,
            None if output_names is None else _beside(names, output_names),
            allow_same_io_names=True,
            fusions=self.options.fusions,
            strip_prefix=f"{PIECE}.",
            torchscript=self.options.torchscript,
        )
        if prepared.detour:
            self.notes.append(redacted(prepared.detour))
        return replace(prepared, graph=_without_unread_states(prepared.graph))

    def _translated(self, graph: TorchModuleIRGraph) -> NnefGraph:
        self._enter(Stage.TRANSLATE)
        missing = [op for op in graph.ops if not is_translated(op.target)]
        unsupported = tuple(dict.fromkeys(f"{op.target}{f' ({op.source})' if op.source else ''}" for op in missing))
        properties = tuple(producer_properties(source_model=self.case.piece.class_name).items())
        try:
            return translate_graph(
                graph, self.options.target, TranslationOptions(properties=properties), self.case.module
            )
        except T2NError as error:
            guilty = operator_in(error, graph)
            if guilty is None:
                raise _AttemptError(error, unsupported=unsupported) from error
            path = self._full_path(guilty.module_path)
            raise _AttemptError(error, str(guilty.target), path, guilty.source, unsupported) from error

    # --- PyTorch's side -----------------------------------------------------------------------------

    def _prepare_weights(self) -> None:
        """Widen bf16, which the engine does not have; make random weights where there are none."""
        module = self.case.module
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if size <= self.options.materialise_bytes and self.case.piece.path:
                fill_with_random(module)
                self.notes.append("tried with random weights")
        if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
            module.float()
            self.notes.append("computed in float32: the engine has no bfloat16")

    def _plain(self, recorded: RecordedCall) -> RecordedCall:
        """Return a call whose tensors are as the piece is tried with: f32 for bf16, random for meta."""
        has_weights = not any(tensor.is_meta for tensor in self.case.module.parameters())
        generator = torch.Generator().manual_seed(0)

        def plain(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta and has_weights:
                tensor = random_like(tensor, generator)
            return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

        held = {
            name: replace(kept, tensor=None if kept.tensor is None else plain(kept.tensor))
            for name, kept in recorded.held.items()
        }
        return replace(recorded, held=held)

    def _references_if_possible(self, module: PieceModule, calls: Sequence[RecordedCall]) -> list[_Reference]:
        """Run the piece alone; where PyTorch itself cannot (no f16 kernel on this machine), what was recorded has to do."""
        try:
            return self._references(module, calls)
        except T2NError:
            raise
        except Exception as error:  # whatever the model's or PyTorch's code raises
            first = next(iter(str(error).splitlines()), type(error).__name__)
            self.notes.append(f"PyTorch does not run it alone here: {redacted(first)}")
        recorded = [] if self.options.isolated else [_Reference(call, call.outputs()) for call in calls]
        return [
            each for each in recorded if each.outputs and not any(tensor.is_meta for tensor in each.outputs.values())
        ]

    def _references(self, module: PieceModule, calls: Sequence[RecordedCall]) -> list[_Reference]:
        """Run the piece alone in PyTorch on every recorded call, twice on the first.

        Raises:
            NonDeterministicError: the second time is not like the first.
        """
        found: list[_Reference] = []
        for call in calls:
            try:
                module.feed.sizes(module.leaves(call))
            except CaptureError as error:
                self.notes.append(f"set {call.call.set_index} was left out: {error.message}")
                continue
            found.append(_Reference(call, module.answers(call)))
            if call is calls[0]:
                self._check_determinism(found[0].outputs, module.answers(call), call)
        return found

    def _check_determinism(
        self, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], call: RecordedCall
    ) -> None:
        for name, tensor in first.items():
            if not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(second[name])):
                raise NonDeterministicError(
                    f"{self.case.piece.class_name}: run twice on the same inputs, output {name!r} differs.",
                    "Random numbers have no place in an archive: take them as inputs, or switch them off.",
                )
        for name, held in call.results.items():
            before = held.tensor
            if before is None or before.is_meta or name not in first or before.shape != first[name].shape:
                continue
            if before.is_floating_point() and not torch.allclose(
                before.float(), first[name].float(), rtol=1e-2, atol=1e-2 * float(before.float().abs().max() or 1)
            ):
                self.notes.append(
                    f"run alone, output {name} is not what was recorded: training mode, or something beside its arguments"
                )

    # --- the engine's side --------------------------------------------------------------------------

    def _examples(
        self, module: PieceModule, provenance: Provenance, references: Sequence[_Reference]
    ) -> list[tuple[RecordedCall, ExampleRun]]:
        """Return the calls that have all that the graph reads, as arrays."""
        found = []
        for reference in references:
            inputs = module.feed.inputs(module.leaves(reference.call))
            missing = [variable.name for variable in provenance.captured.inputs if variable.name not in inputs]
            if missing:
                self.notes.append(f"set {reference.call.call.set_index} was left out: it has no {missing[0]}")
                continue
            arrays = [as_array(inputs[variable.name]) for variable in provenance.captured.inputs]
            outputs = [as_array(as_stored(tensor)) for tensor in reference.outputs.values()]
            found.append((reference.call, ExampleRun(arrays, outputs, provenance.captured.output_names)))
        return found

    def _check(
        self,
        archive: Path,
        provenance: Provenance,
        module: PieceModule,
        examples: Sequence[tuple[RecordedCall, ExampleRun]],
    ) -> None:
        """Run the archive on every call and compare; a failure is followed to the operator that makes it."""
        self._enter(Stage.LOAD)
        try:
            answers = self._ask_all(archive, [example.inputs for _, example in examples])
        except EngineTimeoutError:
            raise
        except EngineError as error:
            found = first_failure(archive, provenance, examples[0][1], self._ask)
            if found is None:
                raise
            path = self._full_path(found.module_path)
            raise _AttemptError(error, found.operator, path, found.source) from error
        self._enter(Stage.COMPARE)
        wrong: list[tuple[float, ExampleRun, Comparison]] = []
        for (call, example), answer in zip(examples, answers, strict=True):
            for comparison in compared(self.options.tolerance, module, call, example, answer):
                self.metrics.append(comparison)
                if not comparison.passed:
                    wrong.append((comparison.share_of_allowed, example, comparison))
        if wrong:
            _, example, worst = max(wrong, key=lambda item: item[0])
            self._blame(archive, provenance, example, worst)

    def _ask_all(self, archive: Path, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        target = self.options.target
        if target.specific_tract_binary_path:
            self._enter(Stage.RUN)
            return [self._ask(archive, arrays) for arrays in inputs]
        with self._wheel().load(archive, registries=target.registries) as model:
            self._enter(Stage.RUN)
            self.engine_nodes = _node_count(model)
            return [model.run(list(arrays)) for arrays in inputs]

    def _ask(self, archive: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        target = self.options.target
        if target.specific_tract_binary_path:
            cli = TractCli(Path(str(target.specific_tract_binary_path)))
            return ask_cli(cli, archive, inputs, registries=target.registries)
        with self._wheel().load(archive, registries=target.registries) as model:
            return model.run(list(inputs))

    def _wheel(self) -> TractWheel:
        packages = wheel_packages(self.options.target.release)
        return TractWheel(timeout_seconds=self.options.engine_seconds, packages=packages)

    def _blame(self, archive: Path, provenance: Provenance, example: ExampleRun, worst: Comparison) -> None:
        error = MismatchError(
            f"{self.case.piece.class_name}: {worst}",
            "Compare the translation of the operator with what PyTorch computes.",
        )
        self.suggestions = self._switches(example) if self.options.suggest else ()
        limit = worst.allowed / max(worst.rms, 1.0)
        try:
            found = first_divergence(archive, provenance, example, self._ask, ToleranceLimits(limit, 0.0))
        except T2NError as search:
            logger.info("the first differing tensor was not found: %s", search)
            found = None
        if found is None:
            raise _AttemptError(error) from None
        raise _AttemptError(error, found.operator, self._full_path(found.module_path), found.source) from None

    def _switches(self, example: ExampleRun) -> tuple[str, ...]:
        """Return the f32 switches that make a piece in half precision pass."""
        if not any(array.dtype == np.float16 for array in example.outputs):
            return ()
        found = []
        for switch, words in F32_SWITCHES.items():
            if getattr(self.options.target, switch):
                continue
            target = replace(self.options.target, **{switch: True})  # type: ignore[arg-type]
            folder = self.options.folder / switch
            folder.mkdir(parents=True, exist_ok=True)
            options = replace(self.options, target=target, folder=folder, suggest=False)
            if not Attempt(replace(self.case), options).run().failed:
                found.append(words)
        return tuple(found)

    # --- the verdict --------------------------------------------------------------------------------

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        self._marks.append((stage, time.perf_counter()))
        self._reached(stage)

    def _full_path(self, inner: str) -> str:
        return ".".join(part for part in (self.case.piece.path, inner) if part)

    def _verdict(self, failure: _AttemptError | None, seconds: float) -> Verdict:
        ends = [*self._marks[1:], (self._stage, time.perf_counter())]
        stage_seconds: dict[str, float] = {}
        for (stage, start), (_, end) in zip(self._marks, ends, strict=True):
            stage_seconds[stage.value] = stage_seconds.get(stage.value, 0.0) + end - start
        error = failure.error if failure is not None else None
        return Verdict(
            key=self.case.piece.key,
            path=self.case.piece.path,
            outcome=Outcome.OK if failure is None else Outcome.FAILED,
            stage=self._stage,
            isolated=self.options.isolated,
            error=None if error is None else error_record(error),
            operator=failure.operator if failure else "",
            module_path=failure.module_path if failure else "",
            source=(model_line(failure.source) or source_in(failure.error)) if failure else "",
            unsupported=failure.unsupported if failure else (),
            metrics=tuple(self.metrics),
            seconds=seconds,
            stage_seconds=stage_seconds,
            engine_nodes=self.engine_nodes,
            suggestions=self.suggestions,
            notes=tuple(dict.fromkeys(self.notes)),
        )


def _node_count(model: WheelModel) -> int | None:
    """Return how many nodes the engine's graph has; None for a release that does not tell."""
    try:
        return len(model.dump())
    except EngineError:
        return None


def _beside(taken: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return names that are written like none of those taken, nor like each other."""
    known = {identifier(name) for name in taken}
    found = []
    for name in names:
        while identifier(name) in known:
            name = f"out_{name}"
        known.add(identifier(name))
        found.append(name)
    return found


def _without_unread_states(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Leave out inputs that nothing reads, as the parts of a cache that belong to other layers, unless a size is known by them."""
    used = {tensor.name for op in graph.ops for tensor in op.tensor_inputs()} | {out.name for out in graph.outputs}
    kept = [variable for variable in graph.inputs if variable.name in used]
    known = {dim for variable in kept for dim in variable.shape if not isinstance(dim, int)}
    for variable in graph.inputs:
        if variable.name not in used and any(_is_new(dim, known) for dim in variable.shape):
            known |= {dim for dim in variable.shape if not isinstance(dim, int)}
            kept.append(variable)
    names = {variable.name for variable in kept} or {variable.name for variable in graph.inputs}
    return replace(graph, inputs=tuple(variable for variable in graph.inputs if variable.name in names))


def _is_new(dim: Dim, known: set[Any]) -> bool:
    return not isinstance(dim, int) and dim not in known


__all__ = ["F32_SWITCHES", "Attempt", "AttemptOptions", "NonDeterministicError"]

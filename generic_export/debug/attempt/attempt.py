"""One piece through all stages: captured, translated, written, loaded, run on every recorded input set, compared.

In: a `Case` and `AttemptOptions`. Out: a `Verdict`, whatever happens. Runs in a worker process (`worker.py`) that may die;
`reached` is told each stage before it begins. The module may be changed here: the process has its own copy of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from generic_export.capture import Prepared, evaluation_mode
from generic_export.compare.comparison import MeasuredTolerance
from generic_export.debug.archive.bisect import Provenance
from generic_export.debug.attempt.engine_runs import EngineRuns
from generic_export.debug.attempt.locate import (
    LocatedError,
    error_record,
    model_line,
    operator_in,
    source_in,
    untranslated,
)
from generic_export.debug.attempt.piece_module import PieceModule, calls_for, piece_module, prepare_piece
from generic_export.debug.attempt.pytorch_runs import PyTorchRuns
from generic_export.debug.privacy import redacted
from generic_export.debug.record.pieces import Case
from generic_export.debug.records import Outcome, Stage, Verdict
from generic_export.documents import producer_properties, translate_graph, with_tensors
from generic_export.errors import MismatchError, T2NError
from generic_export.inference_target.tract.engines.wheel_process import reuse_workers
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.capture.quantised_modules import spelled_out
from generic_export.torch_graph.fusion import Fusion
from generic_export.translate.translate import TranslationOptions
from generic_export.write.document import write_document

Reached = Callable[[Stage], None]

# The engine's switches for models in half precision, by what they say on the command line of an export.
F32_SWITCHES: Mapping[str, str] = {
    "force_norm_in_f32": "norms in f32 (TractNNEF(force_norm_in_f32=True))",
    "force_attention_inner_in_f32": "attention in f32 (TractNNEF(force_attention_inner_in_f32=True))",
    "force_linear_accumulation_in_f32": "matmuls with f32 accumulation (TractNNEF(force_linear_accumulation_in_f32=True))",
}


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


class Attempt:
    """One try; used once."""

    def __init__(self, case: Case, options: AttemptOptions, reached: Reached = lambda _stage: None) -> None:
        self.case = case
        self.options = options
        self._reached = reached
        self._stage = Stage.CAPTURE
        self._marks: list[tuple[Stage, float]] = []
        self.notes: list[str] = list(case.piece.notes)
        self.suggestions: tuple[str, ...] = ()
        self._pytorch = PyTorchRuns(case, self.notes, isolated=options.isolated)
        self._engine = EngineRuns(options.target, options.tolerance, options.engine_seconds, self._enter)

    def run(self) -> Verdict:
        """Try the piece."""
        began = time.perf_counter()
        failure: LocatedError | None = None
        try:
            with evaluation_mode(self.case.module), torch.no_grad(), reuse_workers():
                self._stages()
        except LocatedError as found:
            failure = found
        except Exception as error:  # whatever the model's or PyTorch's code raises is the verdict
            failure = LocatedError(error)
        return self._verdict(failure, time.perf_counter() - began)

    # --- the stages ---------------------------------------------------------------------------------

    def _stages(self) -> None:
        self._enter(Stage.CAPTURE)
        self._pytorch.prepare_weights(self.options.materialise_bytes)
        calls = [self._pytorch.plain_call(call) for call in calls_for(self.case, dynamic=self.options.dynamic)]
        module = piece_module(self.case, calls[0], opaque=self.options.isolated)
        references = self._pytorch.run(module, calls)
        with spelled_out(module):
            prepared = self._prepared(module, list(references[0].outputs) if references else None)
            document = self._translated(prepared)
            if not references:
                self.notes.append("nothing to compare with: it was not written or not run")
                return
            self._enter(Stage.WRITE)
            document, sources = with_tensors(document, prepared.sources)
            path = self.options.folder / "model"
            archive = write_document(path, document, sources, compression_level=None, overwrite=True).path
            provenance = Provenance(prepared.graph, document, prepared.stored)
            examples = self._pytorch.examples(module, prepared.graph, references)
            try:
                self._engine.check(archive, provenance, module, examples)
            except LocatedError as found:
                half = any(array.dtype == np.float16 for _, example in examples for array in example.outputs)
                if self.options.suggest and half and isinstance(found.error, MismatchError):
                    self.suggestions = self._switches()
                raise

    def _prepared(self, module: PieceModule, output_names: Sequence[str] | None) -> Prepared:
        """Capture the piece.

        Args:
            module: the piece.
            output_names: None where the piece was not run here.
        """
        self._enter(Stage.CAPTURE)
        options = self.options
        if output_names is None and not options.isolated:
            recorded = self.case.calls[0]
            output_names = [*recorded.results, *(f"out_{name}" for name in recorded.extra)]
        prepared = prepare_piece(
            module,
            options.target,
            output_names,
            dynamic=options.dynamic,
            fusions=options.fusions,
            torchscript=options.torchscript,
        )
        if prepared.detour:
            self.notes.append(redacted(prepared.detour))
        return prepared

    def _translated(self, prepared: Prepared) -> NnefGraph:
        self._enter(Stage.TRANSLATE)
        graph = prepared.graph
        unsupported = untranslated(graph)
        properties = tuple(producer_properties(source_model=self.case.piece.class_name).items())
        try:
            return translate_graph(
                graph, self.options.target, TranslationOptions(properties=properties), self.case.module
            )
        except T2NError as error:
            guilty = operator_in(error, graph)
            if guilty is None:
                raise LocatedError(error, unsupported=unsupported) from error
            raise LocatedError(error, str(guilty.target), guilty.module_path, guilty.source, unsupported) from error

    def _switches(self) -> tuple[str, ...]:
        """Return the f32 switches that make a piece in half precision pass."""
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

    def _full_path(self, inner: str | None) -> str:
        """Return the path of a module of the piece in the whole model; "" for None."""
        return "" if inner is None else ".".join(part for part in (self.case.piece.path, inner) if part)

    def _verdict(self, failure: LocatedError | None, seconds: float) -> Verdict:
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
            module_path=self._full_path(failure.module_path) if failure else "",
            source=(model_line(failure.source) or source_in(failure.error)) if failure else "",
            unsupported=failure.unsupported if failure else (),
            metrics=tuple(self._engine.metrics),
            seconds=seconds,
            stage_seconds=stage_seconds,
            engine_nodes=self._engine.node_count,
            suggestions=self.suggestions,
            notes=tuple(dict.fromkeys(self.notes)),
        )


__all__ = ["F32_SWITCHES", "Attempt", "AttemptOptions"]

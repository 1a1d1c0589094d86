"""`export_llm`: a Hugging Face model in, a folder with checked tract archives out, whatever the task.

source -> task.graphs -> stored form -> write -> task.check -> rename into place.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from generic_export.devices import CPU
from generic_export.errors import (
    CacheRangeError,
    EngineLoadError,
    MissingTensorError,
    OptionError,
    SourceChangedError,
    WeightError,
)
from generic_export.inference_target.tract.engines.device_forms import device_notes
from generic_export.tested_versions import TORCH, TRACT, TRANSFORMERS, new_doubts
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastReport
from generic_export.weights.held_file import HeldFile, refuse_changed
from generic_export.weights.values import value_pieces
from generic_export.write.document import ArchivePlan, WrittenArchive
from quant.recipe import RECIPE_FILE
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.cache_range import require_room
from t2n_llm.check.devices import absence_of, named_after
from t2n_llm.check.engines import require_engine
from t2n_llm.check.loss import warn_of_loss
from t2n_llm.check.reference import typical_tokens
from t2n_llm.compress.compressed import Captured, prepare
from t2n_llm.compress.stored_form import StoredForm, plain_form, stored_forms, summary_of
from t2n_llm.export.folder import CARD_FILE, MANIFEST_NAME, TESTS_FOLDER, calibration_folder, check_free, recover
from t2n_llm.export.leftovers import telling_leftovers
from t2n_llm.export.manifest import Manifest, origin, stored_tensors
from t2n_llm.export.next_step import suggested_diagnosis
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.output import ExportFolder, ExportResult
from t2n_llm.export.plan import ExportPlan, make_plan
from t2n_llm.graph.capture_steps import captures_told
from t2n_llm.graph.interface import interface
from t2n_llm.graph.ranges import RangeRequest
from t2n_llm.option import keywords_of, made, options_of
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.adapter import Adapter, open_adapter
from t2n_llm.source.hub import ModelSource, is_gguf, open_config, open_source
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.auto import form_of, task_of_config
from t2n_llm.tasks.frontends.check import with_frontend
from t2n_llm.tasks.frontends.frontend import FRONTEND, described_with, front_of, weighted
from t2n_llm.tasks.names import AUTO, FORMS, TEXT_GENERATION
from t2n_llm.tasks.protocol import CheckSubject, Task, TaskGraph
from t2n_llm.tasks.registry import task_of
from t2n_llm.weights.archive_weights import ArchiveWeights
from t2n_llm.weights.names import GraphSources, constant_sources, graph_sources
from t2n_llm.weights.tying import as_loaded

_WAYS = tuple(each.keyword for each in options_of(SourceRef))  # to reach a source


@keywords_of(SourceRef, ExportOptions)
def export_llm(
    source: str | Path | SourceRef,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    reporter: Reporter | None = None,
    **choices: Any,
) -> ExportResult:
    """Export a Hugging Face model for tract and compare it with PyTorch. Language models are compared token by token.

    Args:
        source: hub id (`meta-llama/Llama-3.1-8B`), local folder with config and safetensors, or a `.gguf` file.
        output_dir: folder to create; None for the model's name in the current folder.
        options: all options; None takes them from the keywords.
        reporter: receives progress and warnings; None logs them.
        choices: options of `t2n-llm export` by name (`dtype="f16"`, `task="feature-extraction"`, `check=False`,
            `revision="main"`, ...), which are the fields of `SourceRef` and `ExportOptions`.

    Returns:
        The archives, the manifest and the validation report.

    Raises:
        T2NError: see `generic_export.errors`. Nothing is left behind, except that an export which fails its check is kept
            as `<output_dir>.failed` with its report.
    """
    with _opened(source, output_dir, options, choices, reporter, dry=False) as work:
        return work.run()


@keywords_of(SourceRef, ExportOptions)
def plan_llm_export(
    source: str | Path | SourceRef,
    output_dir: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    reporter: Reporter | None = None,
    **choices: Any,
) -> ExportPlan:
    """Return what `export_llm` would write. The graph is captured; no weights are read and no file is written.

    Args:
        source: see `export_llm`.
        output_dir: see `export_llm`.
        options: see `export_llm`.
        reporter: see `export_llm`.
        choices: see `export_llm`.

    Raises:
        T2NError: as `export_llm`, except for errors that depend on the weights' values.
    """
    with _opened(source, output_dir, options, choices, reporter, dry=True) as work:
        return work.plan()


@contextmanager
def _opened(
    source: str | Path | SourceRef,
    output_dir: str | Path | None,
    options: ExportOptions | None,
    choices: Mapping[str, Any],
    reporter: Reporter | None,
    *,
    dry: bool,
) -> Iterator[_Export]:
    """Resolve what is asked for; an error in the block ends in the command that finds its cause.

    Args:
        dry: nothing will be made, so that the engine that would check it is not needed.
    """
    ref, options = _asked(source, options, choices)
    reporter = reporter or LogReporter()
    for doubt in new_doubts(TORCH, TRANSFORMERS, TRACT):
        reporter.warn(doubt)
    with ExitStack() as stack:
        if output_dir is not None:
            _take(Path(output_dir), options.force, reporter, dry)
        if options.check and not dry:
            require_engine(options.checking)
        reporter.stage(f"Reading {ref.name}")
        task, options = _task_and_options(ref, options, reporter)
        stack.enter_context(suggested_diagnosis(ref, options.graph.computes_in, possible=task.diagnosed))
        model = open_source(ref, require_tokenizer=options.require_tokenizer, tell=reporter.stage)
        target = Path(output_dir) if output_dir is not None else Path(model.short_name)
        _take(target, options.force, reporter, dry)
        stack.enter_context(telling_leftovers(target))
        task.refuse(model, options.graph, options.compression, options.adapter)
        model = as_loaded(model, task.network, reporter.warn)
        adapter = open_adapter(SourceRef(options.adapter, token=ref.token)) if options.adapter is not None else None
        casts = CastReport(refuses_nonfinite=not options.allow_nonfinite)
        yield _Export(task, ExportFolder(model, target, options, reporter, casts), adapter)


def _task_and_options(ref: SourceRef, options: ExportOptions, reporter: Reporter) -> tuple[Task, ExportOptions]:
    """Return the task, chosen by the config where nobody named one, and what its models do not need left out of the options."""
    if options.task == AUTO:
        options = replace(options, task=TEXT_GENERATION if is_gguf(ref.name) else _task_of(ref, reporter))
    elif options.task in FORMS and not is_gguf(ref.name):
        options = replace(options, task=_form_of(options.task, ref, reporter))
    task = task_of(options.task)
    return task, options if task.reads_text else replace(options, require_tokenizer=False)


def _task_of(ref: SourceRef, reporter: Reporter) -> str:
    found = open_config(ref)
    folder = Path(ref.name).expanduser()
    name = task_of_config(found.config, folder if folder.is_dir() else None)
    if name != TEXT_GENERATION:
        reporter.stage(f"Exporting for the task {name}, read from the architecture")
    return name


def _form_of(task: str, ref: SourceRef, reporter: Reporter) -> str:
    form = form_of(task, open_config(ref).config)
    if form != task:
        reporter.stage(f"Exporting for {form}, which is the form of {task} that this model has")
    return form


def _take(target: Path, force: bool, reporter: Reporter, dry: bool) -> None:
    """Refuse a place that is not free, once what a process that died was about to replace is back there."""
    if not dry and recover(target):
        reporter.warn(f"{target}: restored; a killed export had moved it aside.")
    check_free(target, force)


def _asked(
    source: str | Path | SourceRef, options: ExportOptions | None, choices: Mapping[str, Any]
) -> tuple[SourceRef, ExportOptions]:
    """Part the keywords into how the source is reached and what is made of it."""
    reached = {name: choices[name] for name in _WAYS if name in choices}
    further = {name: value for name, value in choices.items() if name not in reached}
    ref = source if isinstance(source, SourceRef) else replace(made(SourceRef, reached), name=str(source))
    if options is not None and further:
        raise OptionError(
            f"both options and the keywords {', '.join(further)} were given.", "Put the keywords into the options."
        )
    return ref, options or ExportOptions.of(**further)


@dataclass(frozen=True)
class _Part:
    """One archive before its weights are read: the graph as it will be stored, and where its tensors come from."""

    graph: TaskGraph
    stored: StoredForm
    unused: tuple[str, ...]


def _constant(graph: TaskGraph) -> _Part:
    """Return an archive that holds no weights."""
    return _Part(graph, plain_form(graph.graph, constant_sources(graph.graph, graph.skeleton.buffers)), ())


@dataclass(frozen=True)
class _Export:
    """One export; each step reads what the one before made."""

    task: Task
    folder: ExportFolder
    adapter: Adapter | None

    def run(self) -> ExportResult:
        """Export; once more, with caches in f32, where the check sees keys or values that f16 hardly holds."""
        try:
            return self._run()
        except CacheRangeError as error:
            if not self.folder.options.graph.may_widen_cache:
                raise
            self.folder.reporter.warn(f"{error.message.rstrip('.')}: exporting again with f32 caches.")
        return replace(self, folder=self.folder.with_wide_caches())._run()

    def _run(self) -> ExportResult:
        with self._prepared(dry=False) as (checkpoint, parts):
            return self._made(checkpoint, parts)

    def plan(self) -> ExportPlan:
        """Say what `run` would do."""
        folder, options = self.folder, self.folder.options
        with self._prepared(dry=True) as (_, parts):
            graphs = weighted([part.graph for part in parts])
            plans = {folder.archive_name(part.graph.role): part.stored.plan for part in parts}
            stored_bytes = sum(plan.total_bytes for plan in plans.values())
            check_bytes = self.task.check_bytes(graphs, stored_bytes, options.checking) if options.check else 0
            bundled = options.check and self.task.bundle_bytes(graphs, options.graph, options.checking)
            beside = [CARD_FILE, *folder.companions()] + ([f"{TESTS_FOLDER}/*.npz"] if bundled else [])
            beside += [RECIPE_FILE] if any(part.stored.compression is not None for part in parts) else []
            return make_plan(
                plans,
                folder.target,
                [*beside, MANIFEST_NAME],
                compression_level=folder.compression_level,
                check_bytes=check_bytes,
            )

    @contextmanager
    def _prepared(self, *, dry: bool) -> Iterator[tuple[Checkpoint, tuple[_Part, ...]]]:
        """Capture the graphs and find their weights; unless a recipe calibrates, no weight is read.

        Args:
            dry: calibrate nothing; sizes are the same.
        """
        source, options = self.folder.source, self.folder.options
        checkpoint = source.checkpoint()
        if not dry:
            prepare(options.compression, self.folder.reporter)
        with captures_told(self.folder.reporter):
            graphs = self.task.graphs(source, options.graph, None if dry else self._range_request(checkpoint))
        unseen = options.graph.computes_in == "f16" and any(each.ranges is None for each in weighted(graphs))
        if unseen and not dry:
            self.folder.reporter.warn(
                "Activation ranges were not measured; f16 may overflow. The default, f32, is safe."
            )
        if options.check:
            self.task.refuse_check(weighted(graphs), source, options.compression, options.checking)
        with ExitStack() as stack:
            yield checkpoint, self._parts(stack, graphs, checkpoint, dry)

    def _range_request(self, checkpoint: Checkpoint) -> RangeRequest | None:
        """Ask for a measurement where activations are f16 and somebody looks."""
        folder, options = self.folder, self.folder.options
        if not options.check or options.graph.computes_in != "f16":
            return None
        tokenizer = folder.source.tokenizer() if options.require_tokenizer else None
        tokens = typical_tokens(folder.source.config, tokenizer)
        islands = options.graph.f32_residual == "always"
        return RangeRequest(checkpoint, self.adapter, tokens, folder.reporter, islands)

    def _parts(
        self, stack: ExitStack, graphs: Sequence[TaskGraph], checkpoint: Checkpoint, dry: bool
    ) -> tuple[_Part, ...]:
        """Return the archives as they will be stored, which is decided of all that hold weights together."""
        source, asked, stored = self.folder.source, self.folder.options.compression, weighted(graphs)
        sources = [self._sources(graph, checkpoint) for graph in stored]
        captured = [Captured(each.skeleton, each.graph, found) for each, found in zip(stored, sources, strict=True)]
        calibration = self.task.calibration(source, asked.calibration)
        workspace = partial(calibration_folder, self.folder.target, resume=self.folder.options.resume)
        forms = stack.enter_context(
            stored_forms(
                asked,
                source,
                checkpoint,
                calibration,
                captured,
                self.folder.reporter,
                workspace=workspace,
                devices=self.folder.options.graph.device,
                dry=dry,
            )
        )
        parts = {
            graph.role: _Part(replace(graph, graph=form.graph), self._written_form(graph, form), found.unused)
            for graph, form, found in zip(stored, forms, sources, strict=True)
        }
        return tuple(parts[each.role] if each.role in parts else _constant(each) for each in graphs)

    def _written_form(self, graph: TaskGraph, form: StoredForm) -> StoredForm:
        """Return what is written: everything before it knows the flat graph alone."""
        return form.composed(graph.skeleton.network) if self.folder.options.graph.fragments else form

    def _sources(self, graph: TaskGraph, checkpoint: Checkpoint) -> GraphSources:
        """Return where the tensors of an archive come from."""
        updates = self.adapter.updates(graph.skeleton.network) if self.adapter is not None else None
        try:
            return graph_sources(graph.graph, graph.skeleton, checkpoint, self.folder.casts, updates)
        except MissingTensorError as error:
            raise self.task.explained(error, graph) from error

    def _made(self, checkpoint: Checkpoint, parts: Sequence[_Part]) -> ExportResult:
        """Write the archives, check them, and put everything in place."""
        folder, options = self.folder, self.folder.options
        graphs = weighted([part.graph for part in parts])
        unused = parts[-1].unused
        folder.warn_of_unused(unused)
        for note in _notes(parts):
            folder.reporter.warn(note)
        bundles = self.task.bundle_bytes(graphs, options.graph, options.checking) if options.check else 0
        plans = {part.graph.role: part.stored.plan for part in parts}
        beside = folder.source.held if folder.source.gguf is None else ()  # what a GGUF file says was written by us
        held = (*beside, *checkpoint.held, *(self.adapter.held if self.adapter is not None else ()))
        with _blaming_changes(held), folder.staging(plans, bundles, held) as staging:
            archives = {part.graph.role: self._written(staging, part, checkpoint) for part in parts}
            folder.report_casts()
            folder.copy_companions(staging)
            for part in parts:
                part.stored.write_recipe(staging)
            with _blaming_zeros(parts):
                validation = self._checked(staging, parts, archives) if options.check else None
            if validation is not None:
                require_room(validation.largest_states, options.graph)
            described = self._described(parts, archives)
            if validation is not None:
                warn_of_loss(validation, described["compression"], folder.reporter)
            return folder.complete(staging, archives, validation, unused, described, held)

    def _written(self, staging: Path, part: _Part, checkpoint: Checkpoint) -> WrittenArchive:
        stored, role = part.stored, part.graph.role
        factors = {each.label: each.factor for each in stored.graph.variables if each.factor != 1.0}
        identity = self.folder.identity(checkpoint, adapter=self._recorded_adapter(), role=role, factors=factors)
        return self.folder.write_archive(
            staging, stored.graph, stored.sources, identity, role=role, errors=stored.errors
        )

    def _checked(
        self, staging: Path, parts: Sequence[_Part], archives: Mapping[str, WrittenArchive]
    ) -> ValidationReport:
        options, main = self.folder.options, parts[-1]
        paths = {role: archive.path for role, archive in archives.items()}
        stored = {part.graph.role: part.stored.overrides(paths[part.graph.role]) for part in parts}
        changed = [weights for weights in stored.values() if weights is not None]
        front, graphs = front_of([part.graph for part in parts]), weighted([part.graph for part in parts])
        subject = CheckSubject(
            source=self.folder.source,
            network=main.graph.skeleton.network,
            archives={graph.role: paths[graph.role] for graph in graphs},
            options=options.graph,
            symbols=main.graph.graph.symbols,
            states=main.graph.states,
            needed=lambda: frozenset(name for part in parts for name in part.stored.needed),
            checking=options.checking,
            tolerance=Tolerance.for_export(options.graph.dtype, options.graph.kv_cache, mixed=options.graph.mixed),
            reporter=self.folder.reporter,
            with_text=options.require_tokenizer,
            adapter=self.adapter,
            overrides=ArchiveWeights.joined(changed),
            bundles=staging / TESTS_FOLDER,
        )
        report = self._checked_on_devices(subject, self.task.check(subject))
        if front is None:
            return report
        self.folder.reporter.stage(f"Checking in tract: {front.kind}")
        return with_frontend(report, paths[FRONTEND], front, options.graph.computes_in, options.checking)

    def _checked_on_devices(self, subject: CheckSubject, report: ValidationReport) -> ValidationReport:
        """Check on the devices of the export that are here as well, and say how to check on the others."""
        for device in self.folder.options.graph.device:
            missing = absence_of(device)
            if missing is not None:
                words = ["t2n-llm", "validate", str(self.folder.target), "--device", device]
                again = shlex.join([*words, "--reference", self.folder.source.name])
                self.folder.reporter.warn(f"validated on the CPU only: {missing} On a machine with {device}: {again}")
            elif device != CPU:
                checking = replace(subject.checking, device=device)
                other = named_after(self.task.check(replace(subject, checking=checking, bundles=None)), device)
                report = replace(report, checks=(*report.checks, *other.checks))
        return report

    def _described(self, parts: Sequence[_Part], archives: Mapping[str, WrittenArchive]) -> Manifest:
        source, options, main = self.folder.source, self.folder.options, parts[-1]
        written, graphs = archives[main.graph.role], [part.graph for part in parts]
        interfaces = self.task.interface(source, weighted(graphs), options.graph)
        described: Manifest = {
            **origin(source, options, main.graph.skeleton.network),
            **described_with(front_of(graphs), interfaces),
            "adapter": self._recorded_adapter(),
            "archive": written.path.name,
            "notes": list(_notes(parts)),
            "activation_ranges": {
                part.graph.role: part.graph.ranges.recorded() for part in parts if part.graph.ranges is not None
            },
            "devices": [
                note.asdict()
                for part in parts
                if part.graph.from_checkpoint
                for note in device_notes(part.graph.graph.operations, options.graph.device, part.graph.role)
            ],
            "compression": summary_of([part.stored for part in parts]),
            "tensors": stored_tensors(written),
        }
        if len(parts) > 1:
            described["archives"] = {
                part.graph.role: {
                    "archive": archives[part.graph.role].path.name,
                    "graph": interface(
                        part.graph.graph,
                        part.graph.states,
                        options.graph.dtype if part.graph.from_checkpoint else "f32",
                    ),
                    "tensors": stored_tensors(archives[part.graph.role]),
                    "compression": part.stored.summary(),
                }
                for part in parts
            }
        return described

    def _recorded_adapter(self) -> Mapping[str, Any] | None:
        return self.adapter.recorded() if self.adapter is not None else None


@contextmanager
def planned_again(
    source: ModelSource, options: ExportOptions, adapter: Adapter | None, reporter: Reporter, *, calibrated: bool
) -> Iterator[Mapping[str, ArchivePlan]]:
    """Yield the archives that an export would write, by role; their tensors are streamed when they are read, nothing is written.

    Args:
        source, options, adapter, reporter: of the export.
        calibrated: a run of the model chose values; it is not made again, and those values are others.
    """
    casts = CastReport(refuses_nonfinite=not options.allow_nonfinite)
    folder = ExportFolder(source, Path(source.short_name), options, reporter, casts)
    with _Export(task_of(options.task), folder, adapter)._prepared(dry=calibrated) as (_, parts):
        yield {part.graph.role: part.stored.plan for part in parts}


@contextmanager
def _blaming_changes(files: Sequence[HeldFile]) -> Iterator[None]:
    """Say of whatever goes wrong in the block that the source changed, when it did: then that is why."""
    try:
        yield
    except SourceChangedError:
        raise
    except Exception as error:
        try:
            refuse_changed(files)
        except SourceChangedError as changed:
            raise changed from error
        raise


@contextmanager
def _blaming_zeros(parts: Sequence[_Part]) -> Iterator[None]:
    """Say of an engine that refuses an archive in the block that every matrix is zero, where that is so: tract folds those."""
    try:
        yield
    except EngineLoadError as error:
        matrices = [source for part in parts for source in part.stored.sources.values() if len(source.shape) > 1]
        if any(bool(piece.any()) for source in matrices for piece in value_pieces(source)):
            raise
        raise WeightError(
            "every matrix of the model is zero, and the engine does not load such an archive.",
            "Use a checkpoint with saved weights, or pass --no-check.",
        ) from error


def _notes(parts: Sequence[_Part]) -> tuple[str, ...]:
    """Return what a user should know of the checkpoint, each thing once."""
    return tuple(dict.fromkeys(note for part in parts for note in part.stored.notes))


__all__ = ["ExportResult", "export_llm", "plan_llm_export"]

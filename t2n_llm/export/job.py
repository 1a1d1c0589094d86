"""The beginning of an export: keywords and a source become an `ExportJob`.

In: what `export_llm` was called with. Out: the task, the opened model, the adapter and the folder to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from generic_export.errors import OptionError
from generic_export.tested_versions import TORCH, TRACT, TRANSFORMERS, new_doubts
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastReport
from generic_export.weights.pinned_file import PinnedFile
from t2n_llm.check.engines import require_engine
from t2n_llm.export.failure_hint import report_stale_exports, suggest_diagnosis
from t2n_llm.export.folder import check_free, recover
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.output import ExportFolder
from t2n_llm.graph.options import GraphOptions
from t2n_llm.option import made, options_of
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.adapter import Adapter, open_adapter
from t2n_llm.source.hub import ModelSource, open_source, open_vocoder
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.auto import choose_task
from t2n_llm.tasks.protocol import Task
from t2n_llm.tasks.registry import task_of
from t2n_llm.weights.tying import as_loaded

_SOURCE_KEYWORDS = tuple(each.keyword for each in options_of(SourceRef))


@dataclass(frozen=True)
class ExportJob:
    """An export whose source is open; each stage reads it.

    Attributes:
        task: of the model.
        folder: the model, the folder to make, every option, the reporter.
        checkpoint: the opened weight files.
        adapter: merged into the weights, or None.
    """

    task: Task
    folder: ExportFolder
    checkpoint: Checkpoint
    adapter: Adapter | None

    @property
    def source(self) -> ModelSource:
        """The model."""
        return self.folder.source

    @property
    def options(self) -> ExportOptions:
        """Every option."""
        return self.folder.options

    @property
    def reporter(self) -> Reporter:
        """Receives progress and warnings."""
        return self.folder.reporter

    @property
    def files(self) -> tuple[PinnedFile, ...]:
        """The files of the source that the export reads; of a GGUF file the weights alone, whose configs this project writes."""
        beside = self.source.held if self.source.gguf is None else ()
        vocoder = self.source.vocoder.checkpoint.held if self.source.vocoder is not None else ()
        return (*beside, *self.checkpoint.held, *vocoder, *(self.adapter.held if self.adapter is not None else ()))

    @property
    def recorded_adapter(self) -> Mapping[str, Any] | None:
        """The adapter's entry of `export.json`."""
        return self.adapter.recorded() if self.adapter is not None else None

    def with_graph_options(self, graph: GraphOptions) -> ExportJob:
        """Return the job with other options of the graph."""
        return replace(self, folder=replace(self.folder, options=replace(self.options, graph=graph)))


def job_for(
    source: ModelSource, target: Path, options: ExportOptions, adapter: Adapter | None, reporter: Reporter
) -> ExportJob:
    """Return the job for an opened source; options name their task.

    Raises:
        WeightError, CorruptCheckpointError: its weight files cannot be opened.
    """
    casts = CastReport(refuses_nonfinite=not options.allow_nonfinite)
    folder = ExportFolder(source, target, options, reporter, casts)
    return ExportJob(task_of(options.task), folder, source.checkpoint(), adapter)


@contextmanager
def open_job(
    source: str | Path | SourceRef,
    output_dir: str | Path | None,
    options: ExportOptions | None,
    choices: Mapping[str, Any],
    reporter: Reporter | None,
    *,
    dry: bool,
) -> Iterator[ExportJob]:
    """Open a source; an error in the block ends in the command that finds its cause.

    Args:
        source, output_dir, options, reporter: see `export_llm`.
        choices: its keywords.
        dry: nothing will be made, so that no engine is needed.
    """
    ref, options = _source_and_options(source, options, choices)
    reporter = reporter or LogReporter()
    for doubt in new_doubts(TORCH, TRANSFORMERS, TRACT):
        reporter.warn(doubt)
    with ExitStack() as stack:
        if output_dir is not None:
            _claim(Path(output_dir), options.force, reporter, dry)
        if options.check and not dry:
            require_engine(options.checking)
        reporter.stage(f"Reading {ref.name}")
        task = task_of(choose_task(options.task, ref, reporter))
        options = replace(options, task=task.name, require_tokenizer=options.require_tokenizer and task.reads_text)
        stack.enter_context(suggest_diagnosis(ref, options.graph.computes_in, possible=task.diagnosed))
        model = open_source(ref, require_tokenizer=options.require_tokenizer, tell=reporter.stage)
        if options.vocoder is not None:
            model = replace(model, vocoder=open_vocoder(SourceRef(options.vocoder, token=ref.token)))
        target = Path(output_dir) if output_dir is not None else Path(model.short_name)
        _claim(target, options.force, reporter, dry)
        stack.enter_context(report_stale_exports(target))
        task.refuse(model, options.graph, options.compression, options.adapter)
        model = as_loaded(model, task.network, reporter.warn)
        adapter = open_adapter(SourceRef(options.adapter, token=ref.token)) if options.adapter is not None else None
        yield job_for(model, target, options, adapter, reporter)


def _source_and_options(
    source: str | Path | SourceRef, options: ExportOptions | None, choices: Mapping[str, Any]
) -> tuple[SourceRef, ExportOptions]:
    """Split the keywords into those of the source and those of the export."""
    reached = {name: choices[name] for name in _SOURCE_KEYWORDS if name in choices}
    further = {name: value for name, value in choices.items() if name not in reached}
    ref = source if isinstance(source, SourceRef) else replace(made(SourceRef, reached), name=str(source))
    if options is not None and further:
        raise OptionError(
            f"both options and the keywords {', '.join(further)} were given.", "Put the keywords into the options."
        )
    return ref, options or ExportOptions.of(**further)


def _claim(target: Path, force: bool, reporter: Reporter, dry: bool) -> None:
    """Refuse a place that is not free, after a folder that a killed export moved aside is back in its place."""
    if not dry and recover(target):
        reporter.warn(f"{target}: restored; a killed export had moved it aside.")
    check_free(target, force)


__all__ = ["ExportJob", "job_for", "open_job"]

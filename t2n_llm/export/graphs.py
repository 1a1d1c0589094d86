"""The graphs of an export, stage by stage: captured, measured, translated, stored.

In: an `ExportJob`. Out: `ModelGraph`s, then a `StoredGraph` for each archive. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from generic_export.errors import MissingTensorError
from generic_export.weights.half import CastReport
from generic_export.write.document import ArchivePlan, match_sources
from t2n_llm.check.reference import typical_tokens
from t2n_llm.compress.compressed import prepare
from t2n_llm.compress.storage import store_graphs
from t2n_llm.compress.stored_graph import StoredGraph
from t2n_llm.export.folder import calibration_folder
from t2n_llm.export.job import ExportJob, job_for
from t2n_llm.export.options import ExportOptions
from t2n_llm.graph.capture import report_captures, translate_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import RangeRequest, fit_ranges
from t2n_llm.graph.storage import choose_storage
from t2n_llm.model_graph import ModelGraph, weighted
from t2n_llm.reporter import Reporter
from t2n_llm.source.adapter import Adapter
from t2n_llm.source.hub import ModelSource


def translate_graphs(job: ExportJob, *, dry: bool = False) -> list[ModelGraph]:
    """Capture and translate the graphs of a model, and find their weights in the checkpoint.

    Weights are read only to measure f16 activations, which a check asks for.

    Args:
        job: the export.
        dry: measure nothing.

    Raises:
        UnknownArchitectureError, CaptureError, TranslationError: the model cannot be expressed.
        NumericRangeError: f16 does not hold its activations.
        MissingTensorError, WeightError: the checkpoint lacks a parameter, or has it in another shape.
        NotEnoughMemoryError: the check does not fit in memory.
    """
    options = job.options
    if not dry:
        prepare(options.compression, job.reporter)
    with report_captures(job.reporter):
        graphs = [_with_parameters(job, graph) for graph in job.task.graphs(job.source, options.graph)]
    if not dry and options.graph.computes_in == "f16":
        graphs = _with_ranges(job, graphs)
    graphs = [_translated(graph, options.graph) for graph in graphs]
    if options.check:
        job.task.refuse_check(weighted(graphs), job.source, options.compression, options.checking)
    # What a checkpoint lacks, or has in another shape, is refused before PyTorch loads it.
    checked = [_with_sources(job, graph, CastReport()) for graph in graphs]
    for graph in checked:
        match_sources(graph.document, graph.sources)
    return checked


def _with_parameters(job: ExportJob, graph: ModelGraph) -> ModelGraph:
    """Return a graph with the places of its weights; a front end has constants only."""
    if not graph.from_checkpoint:
        return graph.with_parameters()
    updates = job.adapter.updates(graph.network) if job.adapter is not None else None
    return graph.with_parameters(graph.checkpoint or job.checkpoint, updates)


def _with_ranges(job: ExportJob, graphs: Sequence[ModelGraph]) -> list[ModelGraph]:
    """Measure f16 activations where the export is checked; warn where one is not measured."""
    options, fronts = job.options, [graph for graph in graphs if not graph.from_checkpoint]
    fitted = weighted(graphs)
    if options.check:
        tokenizer = job.source.tokenizer() if options.require_tokenizer else None
        tokens = typical_tokens(job.source.config, tokenizer)
        ranges = RangeRequest(tokens, job.reporter, f32_regions=options.graph.f32_residual == "always")
        fitted = fit_ranges(fitted, ranges, job.task.typical_inputs)
    if any(graph.ranges is None for graph in fitted):
        job.reporter.warn("Activation ranges were not measured; f16 may overflow. The default, f32, is safe.")
    return [*fronts, *fitted]


def _with_sources(job: ExportJob, graph: ModelGraph, casts: CastReport) -> ModelGraph:
    """Return a graph with the values of its variables, which nothing has read yet."""
    try:
        return graph.with_sources(casts)
    except MissingTensorError as error:
        raise job.task.explained(error, graph) from error


def finish_graphs(job: ExportJob, graphs: Sequence[ModelGraph]) -> list[ModelGraph]:
    """Choose the dtypes of translated graphs, and cut those that are written as several archives.

    Args:
        job: the export, its options as the ranges decided them.
        graphs: translated.
    """
    options, task = job.options.graph, job.task
    finished = [choose_storage(graph, options) for graph in graphs]
    parts = [
        part for graph in finished for part in (task.archives(graph, options) if graph.from_checkpoint else (graph,))
    ]
    return [_with_sources(job, part, job.folder.casts) for part in parts]


def _translated(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Translate a graph; what was captured stays in memory only where it may be translated for other caches."""
    translated = translate_model(graph, options)
    return translated if options.cache_decides_attention else replace(translated, captured=None)


@contextmanager
def store_archives(
    job: ExportJob, graphs: Sequence[ModelGraph], *, dry: bool = False
) -> Iterator[tuple[StoredGraph, ...]]:
    """Yield the archives of an export as they will be written; their sources live as long as the block.

    Args:
        job: the export.
        graphs: finished.
        dry: calibrate nothing; sizes are the same.

    Raises:
        OptionError: a recipe does not fit the model.
        WeightError: a tensor cannot be quantised.
    """
    options = job.options
    with store_graphs(
        options.compression,
        job.source,
        job.checkpoint,
        job.task.calibration(job.source, options.compression.calibration),
        weighted(graphs),
        job.reporter,
        workspace=partial(calibration_folder, job.folder.target, resume=options.resume),
        devices=options.graph.device,
        dry=dry,
    ) as stored:
        archives = (*(StoredGraph(graph) for graph in graphs if not graph.from_checkpoint), *stored)
        yield tuple(each.with_fragments() for each in archives) if options.graph.fragments else archives


@contextmanager
def plan_again(
    source: ModelSource, options: ExportOptions, adapter: Adapter | None, reporter: Reporter, *, calibrated: bool
) -> Iterator[Mapping[str, ArchivePlan]]:
    """Yield the archives that an export would write, by role; their tensors are streamed when they are read, nothing is written.

    Args:
        source, options, adapter, reporter: of the export.
        calibrated: a run of the model chose values; it is not made again, and those values are others.
    """
    job = job_for(source, Path(source.short_name), options, adapter, reporter)
    graphs = finish_graphs(job, translate_graphs(job, dry=calibrated))
    with store_archives(job, graphs, dry=calibrated) as stored:
        yield {each.model.role: each.plan for each in stored}


__all__ = ["finish_graphs", "plan_again", "store_archives", "translate_graphs"]

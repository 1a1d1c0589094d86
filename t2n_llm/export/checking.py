"""An export against PyTorch: the reference run before anything is written, and the archives in the engine after it.

In: an `ExportJob` and its graphs. Out: options that the measured states decide, then a `ValidationReport`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from generic_export.allocator import return_freed_memory
from generic_export.devices import CPU
from generic_export.errors import EngineLoadError, WeightError
from generic_export.weights.values import value_pieces
from generic_export.write.document import WrittenArchive
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.cache_range import by_kind, choose_cache_dtype, require_range
from t2n_llm.check.devices import absence_of, named_after
from t2n_llm.compress.stored_graph import StoredGraph
from t2n_llm.export.folder import TESTS_FOLDER
from t2n_llm.export.job import ExportJob
from t2n_llm.graph.capture import translate_model
from t2n_llm.model_graph import ModelGraph, weighted
from t2n_llm.tasks.frontends.check import with_frontend
from t2n_llm.tasks.frontends.frontend import FRONTEND, front_of
from t2n_llm.tasks.protocol import CheckSubject, ReferenceAnswers
from t2n_llm.weights.archive_weights import ArchiveWeights


def run_reference(job: ExportJob, graphs: Sequence[ModelGraph]) -> ReferenceAnswers | None:
    """Run PyTorch with the checkpoint's weights, before anything is written.

    With a recipe, a second run with the stored weights validates the archives: then this one runs the text alone, and there is
    none for a task that neither keeps states nor compares with the original.

    Args:
        job: the export.
        graphs: translated.

    Raises:
        NotEnoughMemoryError: the model does not fit.
        CorruptCheckpointError: the checkpoint lacks weights that are needed.
    """
    compressed = job.options.compression.compresses
    if compressed and not (job.task.compares_original or any(graph.states for graph in graphs)):
        return None
    return_freed_memory()  # of the capture
    return job.task.reference(replace(_subject(job, graphs), decodes=not compressed))


def fit_caches(
    job: ExportJob, graphs: Sequence[ModelGraph], reference: ReferenceAnswers
) -> tuple[ExportJob, list[ModelGraph]]:
    """Decide the dtype of the caches from the keys and values of a reference run.

    Raises:
        NumericRangeError: f16 caches are asked for, and do not hold the keys and values.
    """
    options = choose_cache_dtype(job.options.graph, reference.largest_states, job.reporter)
    if options == job.options.graph:
        return job, list(graphs)
    if job.options.graph.cache_decides_attention:
        graphs = [translate_model(graph, options) if graph.captured is not None else graph for graph in graphs]
    return job.with_graph_options(options), list(graphs)


def _subject(job: ExportJob, graphs: Sequence[ModelGraph]) -> CheckSubject:
    """Return what PyTorch runs; there are no archives yet."""
    options, main, parts = job.options, graphs[-1], weighted(graphs)
    return CheckSubject(
        source=job.source,
        network=parts[0].network,
        options=options.graph,
        symbols=main.document.symbols,
        needed=lambda: frozenset(variable.parameter for part in parts for variable in part.document.variables),
        checking=options.checking,
        tolerance=Tolerance.for_export(options.graph.dtype, options.graph.kv_cache, mixed=options.graph.mixed),
        reporter=job.reporter,
        with_text=options.require_tokenizer,
        adapter=job.adapter,
    )


def check_archives(
    job: ExportJob,
    stored: Sequence[StoredGraph],
    archives: Mapping[str, WrittenArchive],
    staging: Path,
    reference: ReferenceAnswers | None,
) -> ValidationReport:
    """Compare written archives with PyTorch, on the CPU and on the devices of the export that are here.

    Args:
        job: the export.
        stored: the graphs of the archives.
        archives: by role.
        staging: the folder that they are in.
        reference: what `run_reference` returned; with a recipe PyTorch runs again, with the stored weights.

    Raises:
        EngineError: the engine refused an archive, or died.
        NumericRangeError: f16 caches do not hold the keys and values of the stored weights.
    """
    graphs = [each.model for each in stored]
    paths = {role: archive.path for role, archive in archives.items()}
    subject = replace(
        _subject(job, graphs),
        archives={graph.role: paths[graph.role] for graph in weighted(graphs)},
        states=graphs[-1].states,
        bundles=staging / TESTS_FOLDER,
    )
    original = None
    if reference is None or job.options.compression.compresses:
        found = [each.weights_in(paths[each.model.role]) for each in stored]
        overrides = ArchiveWeights.joined([weights for weights in found if weights is not None])
        subject = replace(subject, overrides=overrides)
        reference, original = job.task.reference(subject), reference
        require_range(job.options.graph, reference.largest_states)
    with _explained_zeros(stored):
        report = job.task.check(subject, reference, original)
        report = _with_devices(job, subject, report)
        front = front_of(graphs)
        if front is not None:
            job.reporter.stage(f"Checking in tract: {front.kind}")
            options = job.options
            report = with_frontend(report, paths[FRONTEND], front, options.graph.computes_in, options.checking)
    return replace(report, largest_states=by_kind(reference.largest_states))


def _with_devices(job: ExportJob, subject: CheckSubject, report: ValidationReport) -> ValidationReport:
    """Check on the devices of the export that are here as well, and say how to check on the others."""
    for device in job.options.graph.device:
        missing = absence_of(device)
        if missing is not None:
            words = ["t2n-llm", "validate", str(job.folder.target), "--device", device]
            again = shlex.join([*words, "--reference", job.source.name])
            job.reporter.warn(f"validated on the CPU only: {missing} On a machine with {device}: {again}")
        elif device != CPU:
            there = replace(subject, checking=replace(subject.checking, device=device), bundles=None)
            other = named_after(job.task.check(there, job.task.reference(there)), device)
            report = replace(report, checks=(*report.checks, *other.checks))
    return report


@contextmanager
def _explained_zeros(stored: Sequence[StoredGraph]) -> Iterator[None]:
    """Say of an engine that refuses an archive in the block that every matrix is zero, where that is so: tract folds those."""
    try:
        yield
    except EngineLoadError as error:
        sources = (source for each in stored for source in each.model.sources.values())
        matrices = [source for source in sources if len(source.shape) > 1]
        if any(bool(piece.any()) for source in matrices for piece in value_pieces(source)):
            raise
        raise WeightError(
            "every matrix of the model is zero, and the engine does not load such an archive.",
            "Use a checkpoint with saved weights, or pass --no-check.",
        ) from error


__all__ = ["check_archives", "fit_caches", "run_reference"]

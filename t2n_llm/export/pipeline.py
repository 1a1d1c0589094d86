"""`export_llm`: a Hugging Face model in, a folder with checked tract archives out, for every task.

source -> graphs -> ranges (one reference run) -> stored graphs -> written archives -> check -> renamed into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from generic_export.errors import SourceChangedError
from generic_export.weights.pinned_file import PinnedFile, refuse_changed
from generic_export.write.document import WrittenArchive
from quant.recipe import RECIPE_FILE
from t2n_llm.check.loss import warn_of_loss
from t2n_llm.compress.stored_graph import StoredGraph
from t2n_llm.export.checking import check_archives, fit_caches, run_reference
from t2n_llm.export.folder import CARD_FILE, MANIFEST_NAME, TESTS_FOLDER
from t2n_llm.export.graphs import finish_graphs, store_archives, translate_graphs
from t2n_llm.export.job import ExportJob, open_job
from t2n_llm.export.manifest import describe_export, notes_of
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.output import ExportResult
from t2n_llm.export.plan import ExportPlan, make_plan
from t2n_llm.model_graph import weighted
from t2n_llm.option import keywords_of
from t2n_llm.reporter import Reporter
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.protocol import ReferenceAnswers


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
    with open_job(source, output_dir, options, choices, reporter, dry=False) as job:
        return _export(job)


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
    with open_job(source, output_dir, options, choices, reporter, dry=True) as job:
        return _plan(job)


def _export(job: ExportJob) -> ExportResult:
    """Run the stages in order; nothing is written before everything that decides the storage is measured."""
    with _explained_changes(job.files):
        graphs = translate_graphs(job)
        job.folder.refuse_full_disk(graphs)
        reference = run_reference(job, graphs) if job.options.check else None
        if reference is not None:
            job, graphs = fit_caches(job, graphs, reference)
        graphs = finish_graphs(job, graphs)
        with store_archives(job, graphs) as stored:
            return _complete(job, stored, reference)


def _plan(job: ExportJob) -> ExportPlan:
    """Return what `_export` would write, from the captured graphs."""
    folder, options, task = job.folder, job.options, job.task
    graphs = finish_graphs(job, translate_graphs(job, dry=True))
    with store_archives(job, graphs, dry=True) as stored:
        plans = {folder.archive_name(each.model.role): each.plan for each in stored}
        graphs = weighted([each.model for each in stored])
        stored_bytes = sum(plan.total_bytes for plan in plans.values())
        check_bytes = task.check_bytes(graphs, stored_bytes, options.checking) if options.check else 0
        bundled = options.check and task.bundle_bytes(graphs, options.graph, options.checking)
        beside = [CARD_FILE, *folder.companions()] + ([f"{TESTS_FOLDER}/*.npz"] if bundled else [])
        beside += [RECIPE_FILE] if any(each.recipe is not None for each in stored) else []
        return make_plan(
            plans,
            folder.target,
            [*beside, MANIFEST_NAME],
            compression_level=folder.compression_level,
            check_bytes=check_bytes,
        )


def _complete(job: ExportJob, stored: Sequence[StoredGraph], reference: ReferenceAnswers | None) -> ExportResult:
    """Write the archives, check them, and put everything in place."""
    folder, options, main = job.folder, job.options, stored[-1].model
    folder.warn_of_unused(main.unused)
    for note in notes_of(stored):
        job.reporter.warn(note)
    graphs = weighted([each.model for each in stored])
    bundles = job.task.bundle_bytes(graphs, options.graph, options.checking) if options.check else 0
    plans, files = {each.model.role: each.plan for each in stored}, job.files
    with folder.staging(plans, bundles, files) as staging:
        archives = {each.model.role: _write(job, staging, each) for each in stored}
        folder.report_casts()
        folder.copy_companions(staging)
        for each in stored:
            each.write_recipe(staging)
        validation = check_archives(job, stored, archives, staging, reference) if options.check else None
        described = describe_export(job, stored, archives)
        if validation is not None:
            warn_of_loss(validation, described["compression"], job.reporter)
        return folder.complete(staging, archives, validation, main.unused, described, files)


def _write(job: ExportJob, staging: Path, stored: StoredGraph) -> WrittenArchive:
    """Stream one archive into the folder."""
    model = stored.model
    factors = {each.label: each.factor for each in model.document.variables if each.factor != 1.0}
    checkpoint = model.checkpoint or job.checkpoint
    identity = job.folder.identity(checkpoint, adapter=job.recorded_adapter, role=model.role, factors=factors)
    return job.folder.write_archive(
        staging, model.document, model.sources, identity, role=model.role, errors=stored.measured_errors
    )


@contextmanager
def _explained_changes(files: Sequence[PinnedFile]) -> Iterator[None]:
    """Raise `SourceChangedError` for any error in the block when the source changed meanwhile: that is the cause."""
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


__all__ = ["ExportResult", "export_llm", "plan_llm_export"]

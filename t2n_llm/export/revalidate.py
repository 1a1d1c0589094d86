"""`t2n-llm validate`: an export folder compared again with the model it came from, whatever its task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from generic_export.inference_target.tract.engines.device_forms import DETECT_ALL, refuse_wrong_forms
from generic_export.read.contents import read_contents
from t2n_llm.check.agreement import Tolerance, ValidationReport
from t2n_llm.check.cache_range import by_kind, require_range
from t2n_llm.check.devices import named_after
from t2n_llm.check.engines import chosen_engine, require_engine
from t2n_llm.check.loss import warn_of_loss
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.options import ValidateOptions
from t2n_llm.export.recorded import (
    graph_options_of,
    open_original,
    open_recorded_adapter,
    recorded_archives,
    recorded_frontend_input,
    recorded_weights,
    require_whole,
)
from t2n_llm.graph.interface import recorded_states
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.frontends.check import with_frontend
from t2n_llm.tasks.frontends.frontend import FRONTEND, frontend_of
from t2n_llm.tasks.names import recorded_task
from t2n_llm.tasks.protocol import CheckSubject
from t2n_llm.tasks.registry import task_of
from t2n_llm.weights.tying import as_loaded


def validate_folder(
    folder: Path,
    reference: str | SourceRef | None = None,
    *,
    options: ValidateOptions | None = None,
    reporter: Reporter | None = None,
) -> ValidationReport:
    """Compare an existing export with PyTorch again.

    Args:
        folder: made by `export_llm`.
        reference: hub id or folder of the reference model; None, or a reference without a name, uses the hub id recorded in
            the folder.
        options: all options; None for the defaults.
        reporter: receives progress and warnings; None logs them.

    Raises:
        ArchiveError: the folder is not an export.
        OptionError: the reference or the adapter is not the one that was exported.
        SourceError: the reference was not found.
        EngineError: the engine refused the archive or died, or the device is missing or computes this archive wrongly.
    """
    options = options or ValidateOptions()
    manifest = read_manifest(folder)
    require_whole(folder, manifest)
    archives = recorded_archives(folder, manifest)
    frontend = archives.pop(FRONTEND, None)
    ref = SourceRef.of(reference or "")
    reporter, task = reporter or LogReporter(), task_of(recorded_task(manifest))
    source = as_loaded(open_original(folder, manifest, ref, options.vocoder), task.network, reporter.warn)
    adapter = open_recorded_adapter(manifest.get("adapter"), options.adapter, ref.token)
    checking = replace(options.checking, device=options.device)
    for archive in archives.values():
        refuse_wrong_forms(archive, options.device, chosen_engine(checking).version, [DETECT_ALL])
    require_engine(checking)
    exported = graph_options_of(manifest)
    tolerance = Tolerance.for_export(exported.dtype, exported.kv_cache, mixed=exported.mixed)
    subject = CheckSubject(
        source=source,
        network=task.network(source),
        options=exported,
        symbols=manifest["graph"].get("symbols", ()),
        # What the archives hold, and nothing else, must be in the checkpoint.
        needed=lambda: frozenset(
            tensor.label for archive in archives.values() for tensor in read_contents(archive).tensors
        ),
        checking=checking,
        tolerance=tolerance.limited(options.atol, options.rtol),
        reporter=reporter,
        with_text=manifest.get("options", {}).get("require_tokenizer", True) and source.has_tokenizer(),
        adapter=adapter,
        archives=archives,
        states=recorded_states(manifest),
    )
    overrides, original = recorded_weights(manifest, archives), None
    if overrides is not None and task.compares_original:
        original = task.reference(replace(subject, decodes=False))
    expected = task.reference(replace(subject, overrides=overrides))
    require_range(exported, expected.largest_states)
    report = replace(task.check(subject, expected, original), largest_states=by_kind(expected.largest_states))
    report = named_after(report, options.device)
    warn_of_loss(report, manifest.get("compression"), reporter)
    if frontend is None:
        return report
    front = frontend_of(source, replace(exported, frontend=True), recorded_frontend_input(folder, manifest))
    if front is None:
        reporter.warn(f"{frontend.name} is not checked: {source.name} has no preprocessor config.")
        return report
    reporter.stage(f"Checking in tract: {front.kind}")
    return with_frontend(report, frontend, front, exported.computes_in, options.checking)

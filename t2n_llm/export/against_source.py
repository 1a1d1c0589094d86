"""`t2n-llm verify --deep`: an export compared with the checkpoint it was made from, by what a new export would write.

In: an export folder and its source. Out: which tensors have the same bytes, which differ, which cannot be told. No engine runs,
nothing is written: the graph is captured again and every tensor streamed through the same casts, into a SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generic_export.interrupts import raise_if_interrupted
from generic_export.write.archive import GRAPH_FILE, Entry
from quant.recipe import RECIPE_FILE
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.request import CompressionOptions
from t2n_llm.export.folder import read_manifest
from t2n_llm.export.graphs import plan_again
from t2n_llm.export.options import ExportOptions
from t2n_llm.export.recorded import graph_options_of, open_original, open_recorded_adapter, require_whole
from t2n_llm.export.verify import DAMAGED, EXTRA, MISSING, Finding, SourceComparison
from t2n_llm.model_graph import MODEL_ROLE
from t2n_llm.reporter import LogReporter, Reporter
from t2n_llm.source.reference import SourceRef
from t2n_llm.tasks.names import recorded_task
from t2n_llm.tasks.registry import task_of
from t2n_llm.weights.tying import as_loaded

_SUFFIX = ".dat"


def compare_with_source(
    folder: Path,
    reference: str | SourceRef | None = None,
    *,
    adapter: str | None = None,
    vocoder: str | None = None,
    reporter: Reporter | None = None,
) -> SourceComparison:
    """Compare what an export recorded of its tensors with what its source gives.

    Args:
        folder: made by `export_llm`; `verify_export` says whether its files are what was recorded.
        reference: hub id or folder of the original; None takes the hub id that is recorded.
        adapter: the one that was merged, where its place is not recorded.
        vocoder: likewise the one beside the model.
        reporter: told what happens; None logs.

    Raises:
        ArchiveError: the folder is no export.
        OptionError: the reference, or the adapter, is not the one that was exported.
        SourceError: the reference cannot be found.
        WeightError: the source lacks a tensor, or holds values that cannot be stored.
    """
    manifest = read_manifest(folder)
    require_whole(folder, manifest)
    ref, reporter = SourceRef.of(reference or ""), reporter or LogReporter()
    options = _options(folder, manifest)
    source = as_loaded(open_original(folder, manifest, ref, vocoder), task_of(options.task).network, reporter.warn)
    merged = open_recorded_adapter(manifest.get("adapter"), adapter, ref.token)
    left = _chosen_by_calibration(manifest)
    tensors = size = 0
    findings: list[Finding] = []
    graphs: list[bool] = []
    with plan_again(source, options, merged, reporter, calibrated=bool(left)) as plans:
        reporter.stage(f"Reading the weights of {source.name}")
        for role, plan in plans.items():
            recorded = _recorded(manifest, role)
            for label, digest, length in _digests(plan.entries(), skipped=left):
                known = recorded.pop(label, None)
                if label == GRAPH_FILE:
                    graphs.append(digest == known)
                elif digest == known:
                    tensors, size = tensors + 1, size + length
                else:
                    findings.append(_difference(label, known))
            findings += [
                Finding(label, EXTRA, "the source has no such tensor") for label in recorded if label not in left
            ]
    return SourceComparison(source.name, tensors, size, left, all(graphs) if graphs else None, tuple(findings))


def _options(folder: Path, manifest: Mapping[str, Any]) -> ExportOptions:
    """Return the choices that decided the bytes of an export."""
    recorded = manifest.get("options", {})
    compressed = recorded.get("compression") or {}
    recipe = folder / RECIPE_FILE if manifest.get("compression") and (folder / RECIPE_FILE).is_file() else None
    graph = graph_options_of(manifest)
    return ExportOptions(
        task=recorded_task(manifest),
        graph=graph,
        compression=CompressionOptions(file=recipe, weights_in_memory=_weights_in_memory(compressed)),
        check=bool(recorded.get("check", True)) and graph.computes_in == "f16",  # what measures f16's range
        allow_nonfinite=True,
        require_tokenizer=bool(recorded.get("require_tokenizer", True)),
    )


def _weights_in_memory(compressed: Mapping[str, Any]) -> str:
    before = "f16" if compressed.get("unpack_blocks") else "stored"  # what earlier exports recorded
    return str(compressed.get("weights_in_memory", before))


def _chosen_by_calibration(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors whose values a run of the model chose, which is not done again."""
    records = (manifest.get("compression") or {}).get("tensors", ())
    return {
        str(record["label"]): f"{record.get('algorithm') or 'calibration'} chose its values"
        for record in records
        if record.get("replaced") or record.get("algorithm") in CALIBRATED
    }


def _recorded(manifest: Mapping[str, Any], role: str) -> dict[str, str]:
    parts = manifest.get("archives") or {}
    record = parts.get(role, manifest) if role != MODEL_ROLE else manifest
    return {str(label): str(entry["sha256"]) for label, entry in record["tensors"].items()}


def _digests(entries: list[Entry], skipped: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Yield the label, the SHA-256 and the length of each file as it would be written."""
    for entry in entries:
        label = entry.name.removesuffix(_SUFFIX)
        if label in skipped:
            continue
        digest = hashlib.sha256()
        for chunk in entry.chunks():
            raise_if_interrupted()
            digest.update(chunk)
        yield label, digest.hexdigest(), entry.size


def _difference(label: str, known: str | None) -> Finding:
    if known is None:
        return Finding(label, MISSING, "the source has it, but the export does not")
    return Finding(label, DAMAGED, "its values differ from the source's")


__all__ = ["compare_with_source"]

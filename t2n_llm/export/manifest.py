"""What `export.json` says: where a model comes from, how it was exported, what is in the folder, and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from generic_export.documents import producer_version
from generic_export.inference_target.tract.engines.device_forms import device_notes
from generic_export.write.document import WrittenArchive
from t2n_llm.compress.stored_graph import StoredGraph, summary_of
from t2n_llm.export.folder import Manifest
from t2n_llm.export.job import ExportJob
from t2n_llm.export.manifest_upgrade import MANIFEST_FORMAT
from t2n_llm.export.options import ExportOptions
from t2n_llm.graph.interface import interface
from t2n_llm.model_graph import weighted
from t2n_llm.source.hub import ModelSource
from t2n_llm.source.source_card import source_card
from t2n_llm.tasks.frontends.frontend import described_with, front_of


def origin(source: ModelSource, options: ExportOptions, network: Any) -> dict[str, Any]:
    """Return what `export.json` says of every export: from what, by what, how.

    Args:
        source, options: what was asked for.
        network: the transformers model.
    """
    return {
        "format": MANIFEST_FORMAT,
        "task": options.task,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": {
            "name": source.public_name,
            "revision": source.revision,
            "architecture": type(network).__name__,
            "model_type": network.config.model_type,
        },
        "source_card": source_card(source.held).asdict(),
        "versions": {
            "t2n-llm": producer_version(),
            **{name: version(name) for name in ("torch", "transformers", "safetensors", "tract")},
        },
        "options": options.recorded(),
    }


def stored_tensors(archive: WrittenArchive) -> dict[str, Any]:
    """Return the digest of every tensor of an archive, by label."""
    return {label: asdict(digest) for label, digest in archive.tensors.items()}


def describe_export(job: ExportJob, stored: Sequence[StoredGraph], archives: Mapping[str, WrittenArchive]) -> Manifest:
    """Return what `export.json` says of the archives of an export, before the folder's own entries.

    Args:
        job: the export.
        stored: the graphs of the archives; the last is the one that a runtime decodes with.
        archives: as written, by role.
    """
    source, options, main = job.source, job.options, stored[-1].model
    graphs = [each.model for each in stored]
    interfaces = job.task.interface(source, weighted(graphs), options.graph)
    described: Manifest = {
        **origin(source, options, weighted(graphs)[0].network),
        **described_with(front_of(graphs), interfaces),
        "adapter": job.recorded_adapter,
        "archive": archives[main.role].path.name,
        "notes": list(notes_of(stored)),
        "activation_ranges": {graph.role: graph.ranges.recorded() for graph in graphs if graph.ranges is not None},
        "devices": [
            note.asdict()
            for graph in weighted(graphs)
            for note in device_notes(graph.document.operations, options.graph.device, graph.role)
        ],
        "compression": summary_of(stored),
        "tensors": stored_tensors(archives[main.role]),
    }
    if len(stored) > 1:
        dtype = options.graph.dtype
        described["archives"] = {each.model.role: _part(each, archives[each.model.role], dtype) for each in stored}
    return described


def _part(stored: StoredGraph, archive: WrittenArchive, dtype: str) -> dict[str, Any]:
    """Return the entry of one of several archives."""
    graph = stored.model
    return {
        "archive": archive.path.name,
        "graph": interface(graph.document, graph.states, dtype if graph.from_checkpoint else "f32"),
        "tensors": stored_tensors(archive),
        "compression": stored.summary(),
    }


def notes_of(stored: Sequence[StoredGraph]) -> tuple[str, ...]:
    """Return facts about the checkpoint for the user, each once."""
    return tuple(dict.fromkeys(note for each in stored for note in each.notes))

"""What `export.json` says: where a model comes from, how it was exported, what is in the folder, and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from generic_export.export import producer_version
from generic_export.nnef.document import WrittenArchive
from generic_export.nnef.graph import NnefGraph
from kvcache.states import StateTensor
from quant.half import OverflowCount
from t2n_llm.adapter import Adapter
from t2n_llm.compression import Compression
from t2n_llm.folder import MANIFEST_FORMAT, file_digests
from t2n_llm.model import Skeleton
from t2n_llm.options import ExportOptions
from t2n_llm.source import ModelSource
from t2n_llm.validate import ValidationReport


@dataclass(frozen=True)
class ExportRecord:
    """Everything that an export knows at its end.

    Attributes:
        source, adapter, options: what was asked for.
        skeleton, graph: the model.
        archive: what was written.
        compression: None without a recipe.
        overflows: values that f16 could not hold, by tensor.
        companions: files copied from the source.
        unused: checkpoint tensors that the model does not use.
        notes: what was done to an already-quantised checkpoint.
        validation: None when there was no check.
    """

    source: ModelSource
    adapter: Adapter | None
    options: ExportOptions
    skeleton: Skeleton
    graph: NnefGraph
    archive: WrittenArchive
    compression: Compression | None
    overflows: Mapping[str, OverflowCount]
    companions: Sequence[str]
    unused: Sequence[str]
    notes: Sequence[str]
    validation: ValidationReport | None

    def manifest(self, folder: Path) -> dict[str, Any]:
        """Return the content of `export.json` for the folder in which everything lies."""
        archive = self.archive
        return {
            **origin(self.source, self.options, self.skeleton.network),
            "adapter": self.adapter.recorded() if self.adapter is not None else None,
            "archive": archive.path.name,
            "graph": self._interface(),
            "model": self._model(),
            "f16_overflows": {name: asdict(overflow) for name, overflow in self.overflows.items()},
            "companions": list(self.companions),
            "unused_tensors": list(self.unused),
            "notes": list(self.notes),
            "compression": self.compression.summary() if self.compression is not None else None,
            "validation": self.validation.asdict() if self.validation is not None else None,
            "tensors": {label: asdict(digest) for label, digest in archive.tensors.items()},
            "files": {archive.path.name: {"bytes": archive.nbytes}} | file_digests(folder, archive.path.name),
        }

    def _interface(self) -> dict[str, Any]:
        return {
            "inputs": list(self.graph.inputs),
            "outputs": list(self.graph.outputs),
            "symbols": list(self.graph.symbols),
            "states": [asdict(state) for state in self.skeleton.states],
            "engine_states": [asdict(state) for state in self.skeleton.engine_states],
            "dtype": self.options.dtype,
        }

    def _model(self) -> dict[str, Any]:
        text_config = self.skeleton.config.get_text_config(decoder=True)
        return {
            "vocab_size": text_config.vocab_size,
            "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
            "sliding_window": getattr(text_config, "sliding_window", None),
            "parameters": sum(prod(variable.shape) for variable in self.graph.variables),
        }


def origin(source: ModelSource, options: ExportOptions, network: Any) -> dict[str, Any]:
    """Return what `export.json` says of every export: from what, by what, how.

    Args:
        source, options: what was asked for.
        network: the transformers model.
    """
    return {
        "format": MANIFEST_FORMAT,
        "task": options.task,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": {
            "name": source.public_name,
            "revision": source.revision,
            "architecture": type(network).__name__,
            "model_type": network.config.model_type,
        },
        "versions": {
            "t2n-llm": producer_version(),
            **{name: version(name) for name in ("torch", "transformers", "safetensors", "tract")},
        },
        "options": options.recorded(),
    }


def recorded_states(manifest: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """Return the states of the graph that a manifest describes; older ones call them caches.

    Raises:
        ArchiveError: a record is not complete.
    """
    graph = manifest["graph"]
    return tuple(StateTensor.from_record(record) for record in graph.get("states", graph.get("caches", ())))

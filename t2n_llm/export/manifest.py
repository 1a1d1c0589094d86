"""What `export.json` says: where a model comes from, how it was exported, what is in the folder, and how it was checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from math import prod
from typing import Any

from generic_export.documents import producer_version
from generic_export.nnef.graph import NnefGraph, NnefVariable
from generic_export.write.document import WrittenArchive
from kvcache.states import StateTensor
from t2n_llm.export.folder import MANIFEST_FORMAT
from t2n_llm.export.options import ExportOptions
from t2n_llm.source.hub import ModelSource

Manifest = dict[str, Any]
"""The content of `export.json`."""


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


def interface(graph: NnefGraph, states: Sequence[StateTensor], dtype: str) -> dict[str, Any]:
    """Return what `export.json` says of a graph's inputs and outputs.

    Args:
        graph: as written.
        states: which of them are states that are fed back.
        dtype: of float inputs and outputs.
    """
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "symbols": list(graph.symbols),
        "states": [asdict(state) for state in states],
        "dtype": dtype,
    }


def text_model(config: Any, variables: Iterable[NnefVariable]) -> dict[str, Any]:
    """Return what `export.json` says of a language model, or of the text part of another one.

    Args:
        config: transformers config.
        variables: everything that is stored.
    """
    text_config = config.get_text_config(decoder=True)
    return {
        "vocab_size": text_config.vocab_size,
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
        "sliding_window": getattr(text_config, "sliding_window", None),
        "parameters": sum(prod(variable.shape) for variable in variables),
    }


def stored_tensors(archive: WrittenArchive) -> dict[str, Any]:
    """Return the digest of every tensor of an archive, by label."""
    return {label: asdict(digest) for label, digest in archive.tensors.items()}


def recorded_states(manifest: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """Return the states of the graph that a manifest describes; older ones call them caches.

    Raises:
        ArchiveError: a record is not complete.
    """
    graph = manifest["graph"]
    return tuple(StateTensor.from_record(record) for record in graph.get("states", graph.get("caches", ())))

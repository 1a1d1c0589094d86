"""What `export.json` says: where a model comes from, how it was exported, what is in the folder, and how it was checked."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from generic_export.documents import producer_version
from generic_export.write.document import WrittenArchive
from t2n_llm.export.manifest_upgrade import MANIFEST_FORMAT
from t2n_llm.export.options import ExportOptions
from t2n_llm.source.hub import ModelSource
from t2n_llm.source.source_card import source_card

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

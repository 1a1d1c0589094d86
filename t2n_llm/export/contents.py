"""Which files of a folder are the export, and which only lie there.

In: its `export.json`. Out: names and patterns, for what is sent and what is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from t2n_llm.export.folder import CARD_FILE, EDITED_CARD_FILE, MANIFEST_NAME

# Archives and bundles of an earlier export in the same repository.
REPLACED = ("*.nnef/*", "*.nnef.tar", "*.nnef.tgz", "tests/*")


def export_patterns(manifest: Mapping[str, Any]) -> list[str]:
    """Return patterns, as huggingface-hub reads them, that match the files of an export and no other."""
    recorded = [str(name) for name in manifest.get("files") or {}]
    parts = manifest.get("archives") or {"model": manifest}
    archives = [str(part["archive"]) for part in parts.values()]
    names = dict.fromkeys([MANIFEST_NAME, CARD_FILE, *archives, *recorded])
    # An archive may be a folder: then everything below it.
    return [pattern for name in names for pattern in (escape(name), f"{escape(name)}/*")]


def other_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files of a folder that are not of the export, hidden ones left out."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink())
    names = [path.relative_to(folder).as_posix() for path in found]
    ours = export_patterns(manifest)
    unseen = (name for name in names if name != EDITED_CARD_FILE and not any(fnmatch(name, each) for each in ours))
    return [name for name in unseen if not any(part.startswith(".") for part in name.split("/"))]


__all__ = ["REPLACED", "export_patterns", "other_files"]

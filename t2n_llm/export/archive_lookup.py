"""Archives as the command line names them: an export's folder, or any NNEF archive.

In: a path. Out: `LocatedArchive`: the archive itself, what to call it, and what its export.json knows, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from generic_export.errors import ArchiveError
from generic_export.write.archive import GRAPH_FILE
from t2n_llm.export.folder import MANIFEST_NAME, archive_in, read_manifest
from t2n_llm.export.manifest_form import ExportManifest
from t2n_llm.graph.prefill import LARGEST_CHUNK, Chunks, chunks_of


@dataclass(frozen=True)
class LocatedArchive:
    """One archive to look at or to measure.

    Attributes:
        path: folder, tar or tgz.
        name: what to call it beside others.
        vocab_size, max_positions: of the model, where the export says.
        prefill: how many tokens of a prompt to feed at once.
    """

    path: Path
    name: str
    vocab_size: int | None = None
    max_positions: int | None = None
    prefill: Chunks = ((0, LARGEST_CHUNK),)


def locate_archive(path: Path) -> LocatedArchive:
    """Find the archive that a path means.

    Args:
        path: a folder made by `t2n-llm export`, a folder with `graph.nnef` in it, a `.tar` or a `.tgz`.

    Raises:
        ArchiveError: there is nothing, or a folder without an archive.
    """
    if not path.exists():
        raise ArchiveError(f"{path}: no such archive.", "Use an export folder, or an archive: folder, .tar, .tgz.")
    if path.is_file() or (path / GRAPH_FILE).is_file():
        around = path.resolve().parent
        beside = read_manifest(around) if _names(around, path.name) else None
        return LocatedArchive(path, _stem(path)) if beside is None else _located(path, around.name, beside)
    if not (path / MANIFEST_NAME).is_file():
        raise ArchiveError(
            f"{path}: neither {MANIFEST_NAME} nor {GRAPH_FILE} in it.", "Use an export folder, or an NNEF archive."
        )
    manifest = read_manifest(path)
    return _located(archive_in(path, manifest), path.resolve().name, manifest)


def distinct_names(archives: Sequence[LocatedArchive]) -> list[str]:
    """Return a name for each archive; those that share one are told apart by a number."""
    names = [archive.name for archive in archives]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:index].count(name) + 1})"
        for index, name in enumerate(names)
    ]


def _names(folder: Path, archive: str) -> bool:
    """Say whether a folder is an export whose archive has this name."""
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        return str(read_manifest(folder).get("archive")) == archive
    except ArchiveError:  # somebody else's export.json
        return False


def _located(path: Path, name: str, manifest: ExportManifest) -> LocatedArchive:
    model = manifest["model"]
    return LocatedArchive(
        path,
        name,
        _positive(model.get("vocab_size")),
        _positive(model.get("max_position_embeddings")),
        chunks_of(manifest),
    )


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


def _stem(path: Path) -> str:
    name = path.resolve().name
    for suffix in (".gz", ".tgz", ".tar", ".nnef"):
        name = name.removesuffix(suffix)
    return name

"""Archives read back: the text of the graph, its inputs and outputs, all files side by side in a folder.

In: a folder, `.tar` or gzipped tar with `graph.nnef` at its root. Out: text, or a folder that the engines load as well.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from generic_export.errors import ArchiveError
from generic_export.read.entries import READ_ERRORS, archive_entries, readable
from generic_export.write.archive import GRAPH_FILE

_SIGNATURE = re.compile(r"^graph\s+(\w+)\s*\(([^)]*)\)\s*->\s*\(([^)]*)\)", re.MULTILINE)


@dataclass(frozen=True)
class GraphSignature:
    """The line that says what goes into a graph and what comes out.

    Attributes:
        name: the graph's identifier.
        inputs, outputs: identifiers, in order.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read_graph_text(archive: Path) -> str:
    """Return the text of an archive's `graph.nnef`.

    Raises:
        ArchiveError: there is none, or it cannot be read.
    """
    path = Path(archive)
    for entry in archive_entries(path):
        if entry.name.removeprefix("./") == GRAPH_FILE:
            with readable(path):
                return entry.stream.read().decode("utf-8")
    raise ArchiveError(f"{path} contains no {GRAPH_FILE}.", "Use an NNEF archive: a folder, a .tar or a .tgz.")


def unpack(archive: Path, folder: Path) -> Path:
    """Copy all files of an archive to a new folder, and return it.

    Raises:
        ArchiveError: the archive cannot be read, or a file of it would land outside the folder.
    """
    # Not tarfile's own filter, which Pythons before 3.11.4 and 3.10.12 do not have.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for entry in archive_entries(Path(archive)):
            place = PurePosixPath(entry.name)
            if place.is_absolute() or ".." in place.parts:
                raise ArchiveError(f"{entry.name!r} would be written outside the folder.")
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(entry.stream, file)
    except (ArchiveError, *READ_ERRORS) as error:  # type: ignore[misc]
        reason = error.message if isinstance(error, ArchiveError) else f"{error}."
        raise ArchiveError(f"{archive} cannot be unpacked: {reason}", "Export or copy it again.") from error
    return folder


def signature_of(text: str) -> GraphSignature:
    """Return the signature of a graph's text.

    Raises:
        ArchiveError: it has none.
    """
    match = _find_signature(text)
    return GraphSignature(match[1], _names(match[2]), _names(match[3]))


def with_outputs(text: str, outputs: Sequence[str]) -> str:
    """Return a graph's text with other outputs: any identifier that its body assigns can be one."""
    match = _find_signature(text)
    return f"{text[: match.start(3)]}{', '.join(outputs)}{text[match.end(3) :]}"


def _find_signature(text: str) -> re.Match[str]:
    match = _SIGNATURE.search(text)
    if match is None:
        raise ArchiveError("the graph's text has no line of the form 'graph name(inputs) -> (outputs)'.")
    return match


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


__all__ = ["GraphSignature", "read_graph_text", "signature_of", "unpack", "with_outputs"]

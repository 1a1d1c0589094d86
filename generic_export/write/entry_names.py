"""Which names an archive's entries may have: those that tract finds again (tract 0.23.9, nnef/src/framework.rs).

In: the name of a new entry, and the names so far. Out: the name noted, or an error that says what is wrong with it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from generic_export.errors import ArchiveError
from generic_export.write.output_path import GRAPH_FILE


def add_name(names: dict[str, bool], name: str) -> None:
    """Check the name of a new entry against what tract does with it, and note it.

    Args:
        names: path -> whether it is a file, of every file and folder so far; changed in place.
        name: of the new entry.

    Raises:
        ArchiveError: tract would lose the entry or take it for another one.
    """
    parts = name.split("/")
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    reason = None
    if "" in parts:
        reason = "the name must be a relative path without empty components"
    elif any(part.startswith(".") for part in parts):
        reason = "a component starts with a dot, and tract skips such entries"
    elif "\0" in name or not _is_unicode(name):
        reason = "the name contains a NUL or is not valid Unicode"
    elif parts[-1] == GRAPH_FILE and folders:
        reason = f"tract would read a {GRAPH_FILE} in a sub-folder as another model"
    elif names.get(name):
        reason = "it is already in the archive"
    elif name in names or any(names.get(folder) for folder in folders):
        reason = "it is both a file and a folder"
    if reason:
        raise ArchiveError(f"archive entry {name!r}: {reason}.", "Rename the tensor or the file.")
    names.update(dict.fromkeys(folders, False))
    names[name] = True


def check_case(folded: dict[str, str], name: str, folder: Path) -> None:
    """Check that a file and the folders it is in are no others to the disk that differ in upper and lower case alone.

    Args:
        folded: without case -> as it was given, of every file and folder so far; changed in place.
        name: of the new file in `folder`.
        folder: exists.

    Raises:
        ArchiveError: they are, as on the usual disks of macOS and Windows.
    """
    parts = name.split("/")
    for path in ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
        known = folded.setdefault(path.casefold(), path)
        if known != path and _ignores_case(folder):
            raise ArchiveError(
                f"{folder}: {known!r} and {path!r} are the same name on this disk.",
                "Rename the tensor, or write a tar.",
            )


def _ignores_case(folder: Path) -> bool:
    with tempfile.NamedTemporaryFile(prefix="case-", dir=folder) as probe:
        return Path(probe.name).with_name(Path(probe.name).name.upper()).exists()


def _is_unicode(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # a lone surrogate, from a file name that is not UTF-8
        return False

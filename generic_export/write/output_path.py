"""The name under which an archive appears: which form it asks for, whether it is free, how a whole archive takes it.

In: the path the user gave. Out: the path and form of the archive; a rename that replaces what may be replaced.
"""

from __future__ import annotations

import enum
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from generic_export.errors import ArchiveError, DiskFullError, OptionError, OutputExistsError
from generic_export.files import exchange
from generic_export.write.journal import delete

GRAPH_FILE = "graph.nnef"


class ArchiveFormat(enum.Enum):
    """The containers that tract loads."""

    DIRECTORY = "directory"
    TAR = "tar"
    TGZ = "tgz"


_SUFFIXES = ((".tar", ArchiveFormat.TAR), (".tgz", ArchiveFormat.TGZ), (".tar.gz", ArchiveFormat.TGZ))


def archive_format_of(path: str | os.PathLike[str], compression_level: int | None = None) -> tuple[Path, ArchiveFormat]:
    """Where an archive goes and in which form.

    Args:
        path: the path asked for. A suffix `.tar`, `.tgz` or `.tar.gz` decides the form; any other name gets the
            suffix that the level calls for (`model.nnef` and level 5 give `model.nnef.tgz`).
        compression_level: 0 is a tar, 1 to 9 a compressed tar, None says nothing: a folder, unless the suffix of
            `path` says otherwise.

    Raises:
        OptionError: suffix and level contradict each other, or the level is not None and not 0 to 9.
    """
    path = Path(path)
    if path.name in ("", ".."):
        raise OptionError(f"{path}: not a name for an archive.", "Give the path of a file or of a new folder.")
    level_format = _format_of_level(compression_level)
    for suffix, suffix_format in _SUFFIXES:
        if path.name.endswith(suffix):
            if compression_level is not None and suffix_format is not level_format:
                raise OptionError(
                    f"{path}: suffix {suffix} contradicts compression level {compression_level}.",
                    "Level 0 is a .tar, 1 to 9 a .tgz; drop the level or change the suffix.",
                )
            return path, suffix_format
    if level_format is ArchiveFormat.DIRECTORY:
        return path, level_format
    return path.with_name(f"{path.name}.{level_format.value}"), level_format


def level_for(path: str | os.PathLike[str], compression_level: int | None) -> int | None:
    """Return a compression level that goes with a path's suffix: 0, the level of who gave none, lets `.tgz` have its own."""
    compressed = Path(path).name.endswith((".tgz", ".tar.gz"))
    return None if compression_level == 0 and compressed else compression_level


def failed_path(path: Path) -> Path:
    """Return the name of an archive whose check has failed, or not been passed yet: `model.nnef.failed.tgz`."""
    for suffix, _ in _SUFFIXES:
        if path.name.endswith(suffix):
            return path.with_name(f"{path.name.removesuffix(suffix)}.failed{suffix}")
    return path.with_name(f"{path.name}.failed")


def check_free_space(path: str | os.PathLike[str], needed_bytes: int) -> None:
    """Refuse early what cannot fit.

    Args:
        path: the file or folder to be written; it need not exist yet.
        needed_bytes: how much will be written.

    Raises:
        DiskFullError: the disk that holds `path` has less than that free.
    """
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise DiskFullError(
            f"{path}: needs {needed_bytes} bytes, {free} are free on its disk.",
            "Free some space or choose another output path.",
        )


def _format_of_level(level: int | None) -> ArchiveFormat:
    if level is None:
        return ArchiveFormat.DIRECTORY
    if type(level) is not int or not 0 <= level <= 9:
        raise OptionError(f"compression level {level!r}: expected 0 (tar), 1 to 9 (tgz), or none (folder).")
    return ArchiveFormat.TGZ if level else ArchiveFormat.TAR


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a name that is taken, unless by an archive (or an empty folder) that may be overwritten.

    Raises:
        OutputExistsError: it is taken; the message says by what.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise OutputExistsError(f"{path}: exists already.", "Ask to overwrite it, or choose another output path.")
    if path.is_dir() and any(path.iterdir()) and not (path / GRAPH_FILE).exists():
        raise OutputExistsError(f"{path}: a folder that is no NNEF archive is not replaced.", "Choose another path.")


def put_in_place(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; a target that a rename cannot replace is moved aside first, then deleted."""
    replaceable = partial.is_file() and (target.is_symlink() or not target.is_dir())
    if replaceable or not os.path.lexists(target):
        os.replace(partial, target)
        return
    if exchange(partial, target):
        delete(partial)
        return
    aside = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    os.rename(target, aside)
    try:
        os.rename(partial, target)
    except BaseException:
        os.rename(aside, target)
        raise
    delete(aside)


# Which names an archive's entries may have: those that tract finds again (tract 0.23.9, nnef/src/framework.rs).
# In: the name of a new entry, and the names so far. Out: the name noted, or an error that says what is wrong with it.
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
        reason = f"tract takes a {GRAPH_FILE} in a sub-folder for another model"
    elif names.get(name):
        reason = "it is in the archive already"
    elif name in names or any(names.get(folder) for folder in folders):
        reason = "it is a file and a folder at once"
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
                f"{folder}: {known!r} and {path!r} are one name on this disk.", "Rename the tensor, or write a tar."
            )


def _ignores_case(folder: Path) -> bool:
    with tempfile.NamedTemporaryFile(prefix="case-", dir=folder) as probe:
        return Path(probe.name).with_name(Path(probe.name).name.upper()).exists()


def _is_unicode(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # a lone surrogate, from a file name that is not UTF-8
        return False

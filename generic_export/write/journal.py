"""What a partial archive already holds: a file beside it, one JSON line for each finished entry.

In: the name of the archive to be written, and what identifies its export. Out: a journal that its owner holds locked.
An owner that dies loses its lock; then another export may go on with the partial, or delete it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from generic_export.journal import append_item, read_items

_ATTEMPTS = 8
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)

# On Windows, other processes cannot read a locked byte. This offset is far beyond the end of any file that is locked here.
_LOCKED_BYTE = 1 << 40


class OwnedFile:
    """A file that is locked for as long as this object (or its process) lives."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def create(cls, path: Path) -> OwnedFile:
        """Make a new file and lock it.

        Raises:
            OSError: the file cannot be made.
        """
        descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
        try_lock(descriptor)  # if the file system has no locks, no other process can claim the file
        return cls(path, descriptor)

    @classmethod
    def claim(cls, path: Path) -> OwnedFile | None:
        """Take over a file whose owner is gone; None when it lives, when that cannot be told, or without permission."""
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError:
            return None
        owned = cls(path, descriptor)
        if try_lock(descriptor) and owned.is_in_place():
            return owned
        owned.release()
        return None

    def is_in_place(self) -> bool:
        """Say whether the path still leads to this file: another export may have deleted it before the lock was ours."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Give up the lock, leave the file."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def remove(self) -> None:
        """Delete the file."""
        if os.name == "nt":  # removes no open file
            self.release()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.release()


def create_owned(target: Path, suffix: str) -> tuple[Path, OwnedFile]:
    """Choose the name of a partial beside `target`, and make the locked file that belongs to it.

    Returns:
        The partial's path (nothing is there yet), and the file, named as the partial plus `suffix`.

    Raises:
        OSError: the folder cannot be written.
    """
    for attempt in range(_ATTEMPTS):
        partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        try:
            owned = OwnedFile.create(partial.with_name(partial.name + suffix))
        except FileExistsError:
            continue
        if owned.is_in_place() or attempt == _ATTEMPTS - 1:
            return partial, owned
        owned.release()
    raise FileExistsError(f"{target}: no free name for a partial file")


def claim_abandoned(target: Path, suffix: str) -> Iterator[tuple[Path, OwnedFile]]:
    """Yield each partial of `target` whose owner is gone, newest first, with its file, locked for the caller."""
    form = re.compile(rf"\.{re.escape(target.name)}\.partial-[0-9a-f]{{8}}{re.escape(suffix)}")
    try:
        found = [path for path in target.parent.iterdir() if form.fullmatch(path.name)]
    except OSError:
        return
    for path in sorted(found, key=_changed, reverse=True):
        owned = OwnedFile.claim(path)
        if owned is not None:
            yield path.with_name(path.name.removesuffix(suffix)), owned


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def occupied_bytes(path: Path) -> int:
    """Return how much of the disk a file or folder takes already; 0 when it is not there."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(getattr(file.stat(), "st_blocks", 0) * 512 for file in files if file.exists())


# --- the journal of an archive ----------------------------------------------------------------

_SUFFIX = ".journal"
_FORMAT = 1


@dataclass(frozen=True)
class EntryRecord:
    """A finished entry.

    Args:
        bytes: its length.
        sha256: of its bytes, in hexadecimal.
        note: what else the export wants to know of the entry when it goes on: plain data, or None.
    """

    bytes: int
    sha256: str
    note: Any = None


class Journal:
    """The record of one partial archive; `entries` is what an earlier owner finished, in the order it did."""

    def __init__(self, partial: Path, owned: OwnedFile, identity: str | None, entries: dict[str, EntryRecord]) -> None:
        self.partial = partial
        self.identity = identity
        self.entries = entries
        self._owned = owned

    @classmethod
    def create(cls, target: Path, identity: str | None) -> Journal:
        """Begin a journal for a new partial of `target`; `identity` is None when the export cannot be continued."""
        partial, owned = create_owned(target, _SUFFIX)
        journal = cls(partial, owned, identity, {})
        try:
            append_item(owned.descriptor, {"format": _FORMAT, "identity": identity})
        except BaseException:
            owned.remove()
            raise
        return journal

    def record(self, name: str, entry: EntryRecord) -> None:
        """Note that an entry's bytes are written."""
        if self.identity is not None:
            append_item(self._owned.descriptor, {"name": name} | asdict(entry))

    def release(self) -> None:
        """Leave partial and journal to whoever continues."""
        self._owned.release()

    def remove(self) -> None:
        """Delete the journal; the partial has become the archive."""
        self._owned.remove()

    def discard(self) -> None:
        """Delete partial and journal."""
        delete(self.partial)
        self._owned.remove()


def claim_journals(target: Path) -> Iterator[Journal]:
    """Yield the journals of `target` whose owners are gone, newest first; each is the caller's to keep or discard."""
    for partial, owned in claim_abandoned(target, _SUFFIX):
        identity, entries, length = _read(owned.path)
        os.ftruncate(owned.descriptor, length)
        yield Journal(partial, owned, identity, entries)


def journal_paths(target: Path) -> list[Path]:
    """Return the journals that lie beside `target`."""
    return sorted(target.parent.glob(f".{_escaped(target.name)}.partial-????????{_SUFFIX}"))


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _read(path: Path) -> tuple[str | None, dict[str, EntryRecord], int]:
    """Identity, finished entries, and how many bytes say so: a damaged line, and all after it, count for nothing."""
    identity: str | None = None
    entries: dict[str, EntryRecord] = {}
    length = 0
    try:
        for record, end in zip(*read_items(path), strict=True):
            if not length:
                identity = str(record["identity"]) if record["format"] == _FORMAT and record["identity"] else None
            else:
                entry = EntryRecord(int(record["bytes"]), str(record["sha256"]), record["note"])
                entries[str(record["name"])] = entry
            length = end
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return identity, entries, length


if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


# Locks on files, which the system gives up with the process that holds them.
# In: an open file. Out: whether this process holds its lock now.
def try_lock(descriptor: int) -> bool:
    """Lock an open file, unless somebody else has locked it. It stays locked until it is closed.

    Returns:
        False where it is locked already, and where the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

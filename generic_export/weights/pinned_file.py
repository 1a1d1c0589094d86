"""A source file, opened once and kept open: what is read of it, and whether it is still the file that lies under its name.

In: a path. Out: its bytes, from the file that was opened, and its identity, which is held against the path once more before what
was made of it is believed.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from generic_export.errors import SourceChangedError

_READERS = 0o044
_GONE = "was deleted"
_REPLACED = "was replaced by another file"
_REWRITTEN = "was written to"


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from another one, and from itself after a change.

    Attributes:
        device, inode: which file it is.
        bytes: its length.
        mtime_ns: when it was last written to, in nanoseconds since 1970.
    """

    device: int
    inode: int
    bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity that a `stat` tells."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def asdict(self) -> dict[str, int]:
        """Return it as plain data."""
        return asdict(self)


class PinnedFile:
    """One open file; it is closed when nothing refers to it any more. Threads may read it at the same time.

    Attributes:
        path: where it was.
        identity: of the file, when it was opened.
        mode: its permission bits.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._moving = threading.Lock()
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.identity = FileIdentity.of(status)
        self.mode = status.st_mode & 0o777

    def fill(self, offset: int, chunk: memoryview) -> int:
        """Read from `offset` on until `chunk` is full; return how many bytes the file did not have."""
        filled = 0
        while filled < len(chunk):
            count = self._read(offset + filled, chunk[filled:])
            if not count:
                break
            filled += count
        return len(chunk) - filled

    def _read(self, offset: int, chunk: memoryview) -> int:
        if sys.platform != "win32" and hasattr(os, "preadv"):  # macOS has it from 11 on
            return os.preadv(self._descriptor, [chunk], offset)
        with self._moving:  # the place to read from belongs to the descriptor
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            data = os.read(self._descriptor, len(chunk))
        chunk[: len(data)] = data
        return len(data)

    def read(self, offset: int = 0, count: int | None = None) -> bytes:
        """Return `count` bytes from `offset` on, or as many as there are; None stands for all that there were at first."""
        data = bytearray(self.identity.bytes - offset if count is None else count)
        missing = self.fill(offset, memoryview(data))
        return bytes(data[: len(data) - missing])

    def change(self) -> str | None:
        """Say what happened to the file since it was opened; None when nothing did."""
        try:
            there, here = FileIdentity.of(os.stat(self.path)), FileIdentity.of(os.fstat(self._descriptor))
        except OSError:
            return _GONE
        if (there.device, there.inode) != (self.identity.device, self.identity.inode):
            return _REPLACED
        return None if there == here == self.identity else _REWRITTEN

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is opened again; here it is still held against its path."""
        return PinnedFile, (self.path,)

    def __deepcopy__(self, memo: object) -> PinnedFile:
        return self


def readers_of(files: Iterable[PinnedFile]) -> int:
    """Return the permission bits for group and others that all files have: what is made of them gets no more."""
    allowed = _READERS
    for file in files:
        allowed &= file.mode
    return allowed


def restrict(folder: Path, readers: int) -> None:
    """Take from a folder, and all in it, what group and others may do beyond `readers` (read bits of a mode)."""
    if readers == _READERS:
        return
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            allowed = 0o700 | readers | (readers >> 2 if path.is_dir() else 0)  # to enter a folder is to read it
            path.chmod(mode & allowed)


def refuse_changed(files: Iterable[PinnedFile]) -> None:
    """Refuse what was made of files that changed meanwhile.

    Raises:
        SourceChangedError: names the first of them, and says what happened to it.
    """
    changed = [(file.path, change) for file in files if (change := file.change()) is not None]
    if changed:
        path, change = changed[0]
        more = f" (and {len(changed) - 1} more of the source's files changed)" if len(changed) > 1 else ""
        raise SourceChangedError(
            f"{path}: {change} while it was being exported{more}.",
            "The export may mix two models: export again when nothing writes to the source.",
        )


__all__ = ["FileIdentity", "PinnedFile", "readers_of", "refuse_changed", "restrict"]

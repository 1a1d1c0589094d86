"""Files, for all rooms: hashed, written whole or not at all, exchanged, and whether writing failed for want of space."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

_READ_BYTES = 1 << 22
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux: fcntl.h, linux/fs.h
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
EXCHANGE_EVENT = "t2n_llm.exchange"
"""Name of the audit event of `exchange`, as Python's own renames have theirs."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_disk_full(error: OSError) -> bool:
    """Say whether a file operation failed for want of space (or quota)."""
    return error.errno in _DISK_FULL


def is_below(error: OSError, folder: Path) -> bool:
    """Say whether a file operation failed on something in a folder."""
    return isinstance(error.filename, str | os.PathLike) and Path(error.filename).absolute().is_relative_to(
        folder.absolute()
    )


def partial_beside(path: Path) -> Path:
    """Return a name beside a file, for what will be renamed to it, that nobody can foresee and put something under."""
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")


def write_whole(path: Path, text: str) -> Path:
    """Write a file of UTF-8 beside its place, then put it there; an earlier one stays until then.

    Raises:
        OSError: it cannot be written there.
    """
    partial = partial_beside(path)
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as file:  # never what somebody else put there
            file.write(text)
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file to the disk.

    Raises:
        OSError: it cannot be flushed.
    """
    # Windows flushes only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder, where the file system can: FUSE, SMB and Windows cannot."""
    with suppress(OSError):
        sync(path)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths, files or folders of one file system, take each other's place in one step of the system.

    Returns:
        False where the system or the file system has no such step (nothing has changed then): Linux's renameat2 is asked.

    Raises:
        OSError: the step failed.
    """
    sys.audit(EXCHANGE_EVENT, str(one), str(other))
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # glibc before 2.28, musl before 1.2.6
        return False
    if not library.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


__all__ = [
    "EXCHANGE_EVENT",
    "exchange",
    "is_disk_full",
    "partial_beside",
    "sha256",
    "sync",
    "sync_folder",
    "write_whole",
]

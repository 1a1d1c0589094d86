"""Files, for all rooms: hashed, written whole or not at all, and whether writing failed for want of space."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

_READ_BYTES = 1 << 22
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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


def write_whole(path: Path, text: str) -> Path:
    """Write a file of UTF-8 beside its place, then put it there; an earlier one stays until then.

    Raises:
        OSError: it cannot be written there.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


__all__ = ["is_disk_full", "sha256", "write_whole"]

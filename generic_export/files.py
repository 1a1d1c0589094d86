"""Files, for all rooms: what their bytes hash to, and whether writing one failed for want of space."""

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


__all__ = ["is_disk_full", "sha256"]

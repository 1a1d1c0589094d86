"""Locks on files, which the system gives up with the process that holds them.

In: an open file. Out: whether this process holds its lock now.
"""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# On Windows, other processes cannot read a locked byte. This offset is far beyond the end of any file that is locked here.
_LOCKED_BYTE = 1 << 40


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


__all__ = ["try_lock"]

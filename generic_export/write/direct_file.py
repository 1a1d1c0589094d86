"""A file written at given positions, past the page cache where the system allows it.

In: an offset and the bytes that belong there, in order. Out: the same bytes on the disk, with few copies on the way.
Several threads may write different regions of one file at once; what lies between regions reads as zeros.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import TypeAlias

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview

STAGING_BYTES = 8 * 1024 * 1024
_BLOCK = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of
_SMALL_BYTES = 1024 * 1024  # below this, waiting for the disk costs more than the page cache does
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class OutputFile:
    """One open file.

    Args:
        path: the file.
        existing: open what is there (an export that goes on) instead of making a new file.

    Raises:
        OSError: the file cannot be opened, or exists already (without `existing`).
    """

    def __init__(self, path: Path, *, existing: bool = False) -> None:
        flags = os.O_WRONLY | getattr(os, "O_BINARY", 0) | (0 if existing else os.O_CREAT | os.O_EXCL)
        self._path = path
        self._descriptor = os.open(path, flags, 0o666)
        self._moving = threading.Lock()
        self._direct = -1
        self._direct_tried = not _O_DIRECT

    def allocate(self, size: int) -> None:
        """Make the file `size` bytes long and have the disk set the room aside, so that a full disk shows now."""
        if not _fallocate(self._descriptor, size):
            os.ftruncate(self._descriptor, size)

    def truncate(self, size: int) -> None:
        """Set the length."""
        os.ftruncate(self._descriptor, size)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write through the page cache."""
        rest = memoryview(data)
        while rest:
            count = self._write(self._descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def _write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if sys.platform != "win32":
            return os.pwrite(descriptor, data, offset)
        with self._moving:  # the place to write at belongs to the descriptor
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.write(descriptor, data)

    def write_blocks(self, offset: int, data: memoryview) -> None:
        """Write whole blocks from page-aligned memory, past the page cache if the file system can."""
        while data and self._direct_descriptor() >= 0:
            try:
                count = self._write(self._direct, data, offset)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._close_direct()
                break
            data, offset = data[count:], offset + count
            if count % _BLOCK:  # the disk is about to be full: the page cache says it properly
                break
        self.write_at(offset, data)

    def sync(self) -> None:
        """Flush to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close; may be called twice."""
        self._close_direct()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _direct_descriptor(self) -> int:
        if not self._direct_tried:
            self._direct_tried = True
            try:
                self._direct = os.open(self._path, os.O_WRONLY | _O_DIRECT)
            except OSError:  # tmpfs of old kernels, some network file systems
                self._direct = -1
        return self._direct

    def _close_direct(self) -> None:
        self._direct_tried = True
        if self._direct >= 0:
            descriptor, self._direct = self._direct, -1
            os.close(descriptor)


class Staging:
    """Page-aligned memory of one writing thread, used for one region after the other."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STAGING_BYTES)
        self.view = memoryview(self._memory)
        self.array = np.frombuffer(self._memory, np.uint8)


class Region:
    """The bytes of a file from `offset` on, written in order.

    Blocks that the region shares with its neighbours go through the page cache, those it owns go past it.

    Args:
        file: where.
        offset: position of the first byte.
        staging: this thread's memory; no other region may use it until this one is closed.
    """

    def __init__(self, file: OutputFile, offset: int, staging: Staging) -> None:
        self._file = file
        self._staging = staging
        self._lead = offset % _BLOCK  # bytes at the front of the staging memory that are the neighbour's
        self._base = offset - self._lead  # file offset of the staging memory
        self._filled = self._lead
        self._flushed = False

    def write(self, data: memoryview) -> None:
        """Add bytes; they are copied, the caller may reuse its memory."""
        source = np.frombuffer(data, np.uint8)
        while len(source):
            count = min(len(source), STAGING_BYTES - self._filled)
            # numpy, because assigning to a memoryview would stop the other threads meanwhile
            np.copyto(self._staging.array[self._filled : self._filled + count], source[:count])
            source = source[count:]
            self._filled += count
            if self._filled == STAGING_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what is still in memory."""
        self._flush()

    def _flush(self) -> None:
        view, end = self._staging.view, self._filled
        if not self._flushed and end < _SMALL_BYTES:
            self._file.write_at(self._base + self._lead, view[self._lead : end])
        else:
            head = min(end, _BLOCK) if self._lead else 0
            body = max(head, end - end % _BLOCK)
            self._file.write_at(self._base + self._lead, view[self._lead : head])
            self._file.write_blocks(self._base + head, view[head:body])
            self._file.write_at(self._base + body, view[body:end])
        self._flushed = True
        self._base, self._lead, self._filled = self._base + STAGING_BYTES, 0, 0


def _fallocate(descriptor: int, size: int) -> bool:
    """Reserve disk space; False where the system or the file system cannot.

    Not `os.posix_fallocate`: where the file system cannot, the C library writes every block of the file instead.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "fallocate64"):  # musl: fallocate takes 64 bits there
        return False
    result: int = library.fallocate64(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) if size else 0
    if not result:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number))

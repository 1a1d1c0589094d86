"""One gzip member, compressed by several threads, the same bytes whatever their number.

In: bytes in order. Out: a gzip file of full-flushed blocks, each compressed by itself.
Formats: RFC 1951 (deflate), RFC 1952 (gzip); one member only, since tract reads no further.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from zlib_ng import zlib_ng

from generic_export.write.direct_file import OutputFile

BLOCK_BYTES = 1024 * 1024
THREADS = min(os.cpu_count() or 1, 8)

# magic, deflate, no flags, no time, no extra flags, unknown system
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK = b"\x03\x00"  # an empty final deflate block
_RAW = -15  # deflate without header, window of 32 KiB


@dataclass(frozen=True)
class _Block:
    data: bytes
    crc: int
    length: int


class GzipStream:
    """Compresses into a file.

    Args:
        file: a new file, which the stream fills from its first byte.
        level: of zlib-ng, 1 to 9.
    """

    def __init__(self, file: OutputFile, level: int) -> None:
        self._file = file
        self._level = level
        self._end = len(_HEADER)  # length of the compressed file so far
        self._crc = self._length = 0  # of the uncompressed bytes so far
        self._pending: bytearray = bytearray()
        self._queue: deque[Future[_Block]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="gzip")
        self._bound = 2 * THREADS + 2
        file.write_at(0, _HEADER)

    def write(self, data: memoryview) -> None:
        """Add bytes; they are copied."""
        while data:
            count = min(len(data), BLOCK_BYTES - len(self._pending))
            self._pending += data[:count]
            data = data[count:]
            if len(self._pending) == BLOCK_BYTES:
                self._submit()

    def finish(self) -> None:
        """Write what is left, and the trailer."""
        if self._pending:
            self._submit()
        self._drain(0)
        trailer = struct.pack("<II", self._crc, self._length & 0xFFFF_FFFF)
        self._file.write_at(self._end, _LAST_BLOCK + trailer)
        self.abandon()

    def abandon(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        block, self._pending = self._pending, bytearray()
        self._queue.append(self._pool.submit(_compress, block, self._level))
        self._drain(self._bound)

    def _drain(self, allowed: int) -> None:
        """Write finished blocks in order until at most `allowed` of them wait."""
        while len(self._queue) > allowed:
            self._append(self._queue.popleft().result())

    def _append(self, block: _Block) -> None:
        self._file.write_at(self._end, block.data)
        self._end += len(block.data)
        self._crc = zlib_ng.crc32_combine(self._crc, block.crc, block.length)
        self._length += block.length


def _compress(data: bytearray, level: int) -> _Block:
    compressor = zlib_ng.compressobj(level, zlib_ng.DEFLATED, _RAW)
    compressed = compressor.compress(data) + compressor.flush(zlib_ng.Z_FULL_FLUSH)
    return _Block(compressed, zlib_ng.crc32(data), len(data))

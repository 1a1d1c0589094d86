"""One gzip member, compressed by several threads, the same bytes whatever their number.

In: bytes in order, cut where the caller says. Out: a gzip file of full-flushed blocks, each compressed by itself.
Formats: RFC 1951 (deflate), RFC 1952 (gzip); one member only, since tract reads no further.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zlib_ng import zlib_ng

from generic_export.write.direct_file import OutputFile

BLOCK_BYTES = 1024 * 1024
THREADS = min(os.cpu_count() or 1, 8)

# magic, deflate, no flags, no time, no extra flags, unknown system
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK = b"\x03\x00"  # an empty final deflate block
_DamagedError: type[Exception] = zlib_ng.error  # type: ignore[assignment]
_RAW = -15  # deflate without header, window of 32 KiB


@dataclass(frozen=True)
class GzipState:
    """Where a stream stands after a cut: enough to go on from there.

    Args:
        end: length of the compressed file in bytes.
        crc: CRC-32 of the uncompressed bytes so far.
        length: how many they are.
        stored_crc: CRC-32 of the compressed bytes so far, header excluded: deflate has padding bits, which say nothing and
            yet belong to the file.
    """

    end: int = len(_HEADER)
    crc: int = 0
    length: int = 0
    stored_crc: int = 0


@dataclass(frozen=True)
class _Block:
    data: bytes
    crc: int
    length: int


class GzipStream:
    """Compresses into a file.

    Args:
        file: where the stream goes, from its first byte.
        level: of zlib-ng, 1 to 9.
        state: go on after a cut that an earlier stream reached; what follows in the file is dropped.
    """

    def __init__(self, file: OutputFile, level: int, state: GzipState | None = None) -> None:
        self._file = file
        self._level = level
        self._state = state or GzipState()
        self._pending: bytearray = bytearray()
        self._queue: deque[Future[_Block] | Callable[[GzipState], None]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="gzip")
        self._bound = 2 * THREADS + 2
        file.truncate(self._state.end if state else 0)
        file.write_at(0, _HEADER)

    def write(self, data: memoryview) -> None:
        """Add bytes; they are copied."""
        while data:
            count = min(len(data), BLOCK_BYTES - len(self._pending))
            self._pending += data[:count]
            data = data[count:]
            if len(self._pending) == BLOCK_BYTES:
                self._submit()

    def cut(self, reached: Callable[[GzipState], None]) -> None:
        """End the block; `reached` is called once everything up to here is written, during a later call."""
        if self._pending:
            self._submit()
        self._queue.append(reached)

    def finish(self) -> None:
        """Write what is left, and the trailer."""
        if self._pending:
            self._submit()
        self._drain(0)
        trailer = struct.pack("<II", self._state.crc, self._state.length & 0xFFFF_FFFF)
        self._file.write_at(self._state.end, _LAST_BLOCK + trailer)
        self.abandon()

    def abandon(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        block, self._pending = self._pending, bytearray()
        self._queue.append(self._pool.submit(_compress, block, self._level))
        self._drain(self._bound)

    def _drain(self, allowed: int) -> None:
        """Write finished blocks in order until at most `allowed` things wait."""
        while self._queue and (len(self._queue) > allowed or not isinstance(self._queue[0], Future)):
            first = self._queue.popleft()
            if isinstance(first, Future):
                self._append(first.result())
            else:
                first(self._state)

    def _append(self, block: _Block) -> None:
        before = self._state
        self._file.write_at(before.end, block.data)
        crc = zlib_ng.crc32_combine(before.crc, block.crc, block.length)
        stored_crc = zlib_ng.crc32(block.data, before.stored_crc)
        self._state = GzipState(before.end + len(block.data), crc, before.length + block.length, stored_crc)


def _compress(data: bytearray, level: int) -> _Block:
    compressor = zlib_ng.compressobj(level, zlib_ng.DEFLATED, _RAW)
    compressed = compressor.compress(data) + compressor.flush(zlib_ng.Z_FULL_FLUSH)
    return _Block(compressed, zlib_ng.crc32(data), len(data))


# --- going on ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GzipSpan:
    """A stretch of a compressed file that an earlier writer finished: what it should hold.

    Args:
        header: uncompressed bytes at its front.
        size: bytes after them that `sha256` is of.
        padding: zero bytes at its end.
        sha256: in hexadecimal.
        after: where the stream stands behind it.
    """

    header: bytes
    size: int
    padding: int
    sha256: str
    after: GzipState


def verify_spans(path: Path, spans: Iterable[GzipSpan]) -> GzipState | None:
    """Decompress a partial file and return where the last whole span ends; None when not even the first is whole."""
    state: GzipState | None = None
    with path.open("rb", buffering=0) as file:
        if file.read(len(_HEADER)) != _HEADER:
            return None
        for span in spans:
            if not _holds(file, state or GzipState(), span):
                break
            state = span.after
    return state


def _holds(file: io.FileIO, before: GzipState, span: GzipSpan) -> bool:
    digest, crc, position = hashlib.sha256(), before.crc, 0
    stored = _Stretch(file, before.end, span.after.end, before.stored_crc)
    body_end = len(span.header) + span.size
    try:
        for data in _inflate(stored):
            crc = zlib_ng.crc32(data, crc)
            if position < len(span.header):
                count = min(len(data), len(span.header) - position)
                if data[:count] != span.header[position : position + count]:
                    return False
            first, last = (min(max(edge - position, 0), len(data)) for edge in (len(span.header), body_end))
            digest.update(memoryview(data)[first:last])
            position += len(data)
    except _DamagedError:
        return False
    whole = position == body_end + span.padding == span.after.length - before.length
    crcs = (crc, stored.crc) == (span.after.crc, span.after.stored_crc)
    return whole and crcs and digest.hexdigest() == span.sha256


class _Stretch:
    """Bytes `begin` to `end` of a file, read once; `crc` goes on from the one given, over what was read."""

    def __init__(self, file: io.FileIO, begin: int, end: int, crc: int) -> None:
        self.crc = crc
        self._file = file
        self._begin = begin
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        position = self._file.seek(self._begin)
        while position < self._end and (data := self._file.read(min(BLOCK_BYTES, self._end - position))):
            position += len(data)
            self.crc = zlib_ng.crc32(data, self.crc)
            yield data


def _inflate(stored: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress a stretch that starts after a full flush, in pieces of at most `BLOCK_BYTES`."""
    inflater = zlib_ng.decompressobj(_RAW)
    for data in stored:
        while data:
            yield inflater.decompress(data, BLOCK_BYTES)
            data = inflater.unconsumed_tail
    while rest := inflater.decompress(b"", BLOCK_BYTES):
        yield rest

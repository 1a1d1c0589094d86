"""The three containers: where each entry of an archive goes, and what stands around it.

In: names and sizes, in the archive's order; then each entry's bytes. Out: a folder, a tar, a gzipped tar.
In a folder and in a tar every entry has its place from the start, so several can be written at once, in any order.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from generic_export.files import sync, sync_folder
from generic_export.write.direct_file import OutputFile, Region, Staging
from generic_export.write.gzip_stream import GzipStream
from generic_export.write.output_path import check_case

_READ_BYTES = 4 * 1024 * 1024
_ALLOCATED_BYTES = 1024 * 1024  # files above it are allocated at once, so that they lie in one piece


class EntryStream(Protocol):
    """An entry while it is written."""

    def write(self, data: memoryview) -> None:
        """Add bytes; they are copied."""

    def close(self) -> None:
        """End the entry. In a folder and in a tar, its bytes are with the system then."""

    def abandon(self) -> None:
        """Leave the entry as it is: the archive will not be finished."""


class EntryPlace(Protocol):
    """Where one entry goes."""

    def open(self, staging: Staging) -> EntryStream:
        """Begin to write it."""
        ...

    def holds(self, sha256: str) -> bool:
        """Say whether the entry lies there already, with that digest."""
        ...


class ArchiveSink(Protocol):
    """One container. `parallel` says whether its entries may be written at the same time."""

    parallel: bool

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Reserve room for entries that will be placed."""

    def place(self, name: str, size: int) -> EntryPlace:
        """Give the next entry its place."""
        ...

    def finish(self) -> None:
        """Write what comes last, flush everything to the disk."""

    def abandon(self) -> None:
        """Close whatever is open."""


# --- folder -----------------------------------------------------------------------------------


class DirectorySink:
    """A folder with one file an entry; files that are there already (an export that goes on) are kept or replaced."""

    parallel = True

    def __init__(self, folder: Path, *, existing: bool = False) -> None:
        folder.mkdir(exist_ok=existing)
        self._folder = folder
        self._files: list[Path] = []
        self._folded: dict[str, str] = {}

    def allocate(self, sizes: Mapping[str, int]) -> None:
        del sizes  # each file is allocated when it is opened

    def place(self, name: str, size: int) -> EntryPlace:
        check_case(self._folded, name, self._folder)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files.append(path)
        return _FilePlace(path, size)

    def finish(self) -> None:
        expected = set(self._files)
        for path in [path for path in self._folder.rglob("*") if path.is_file() and path not in expected]:
            path.unlink()
        # All at the end: the first fsync commits the file system's journal for every file, the others are cheap.
        folders = {folder for path in self._files for folder in path.parents if folder.is_relative_to(self._folder)}
        for path in self._files:
            sync(path)
        for folder in folders:
            sync_folder(folder)

    def abandon(self) -> None:
        pass


class _FilePlace:
    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def open(self, staging: Staging) -> EntryStream:
        self._path.unlink(missing_ok=True)
        file = OutputFile(self._path)
        try:
            if self._size >= _ALLOCATED_BYTES:
                file.allocate(self._size)
            return _RegionStream(Region(file, 0, staging), file)
        except BaseException:
            file.close()
            raise

    def holds(self, sha256: str) -> bool:
        try:
            whole = self._path.stat().st_size == self._size
            return whole and _digest(self._path, 0, self._size) == sha256
        except OSError:
            return False


class _RegionStream:
    """An entry that has its place in a file; the file is closed with it where it is the entry's alone."""

    def __init__(self, region: Region, own_file: OutputFile | None = None) -> None:
        self._region = region
        self._own_file = own_file

    def write(self, data: memoryview) -> None:
        self._region.write(data)

    def close(self) -> None:
        try:
            self._region.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._own_file is not None:
            self._own_file.close()


# --- tar --------------------------------------------------------------------------------------


def tar_header(name: str, size: int) -> bytes:
    """The GNU header of an entry: no times, owners or modes, so that equal entries give equal archives."""
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def tar_size(sizes: Mapping[str, int]) -> int:
    """Length in bytes of the tar that holds entries of these names and sizes."""
    entries = sum(len(tar_header(name, size)) + _padded(size, tarfile.BLOCKSIZE) for name, size in sizes.items())
    return _padded(entries + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)


def _padded(size: int, block: int) -> int:
    return size + -size % block


class TarSink:
    """An uncompressed GNU tar."""

    parallel = True

    def __init__(self, path: Path, *, existing: bool = False) -> None:
        self._path = path
        self._file = OutputFile(path, existing=existing)
        self._existing = existing
        self._position = 0

    def allocate(self, sizes: Mapping[str, int]) -> None:
        self._file.allocate(tar_size(sizes))

    def place(self, name: str, size: int) -> EntryPlace:
        header = tar_header(name, size)
        self._file.write_at(self._position, header)
        offset = self._position + len(header)
        self._position = offset + _padded(size, tarfile.BLOCKSIZE)
        if self._existing:  # what lies between entries is not verified with them
            self._file.write_at(offset + size, bytes(self._position - offset - size))
        return _TarPlace(self._path, self._file, offset, size)

    def finish(self) -> None:
        self._file.truncate(self._position)  # what lies behind the last entry becomes zeros again
        self._file.truncate(_padded(self._position + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE))
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


class _TarPlace:
    def __init__(self, path: Path, file: OutputFile, offset: int, size: int) -> None:
        self._path = path
        self._file = file
        self._offset = offset
        self._size = size

    def open(self, staging: Staging) -> EntryStream:
        return _RegionStream(Region(self._file, self._offset, staging))

    def holds(self, sha256: str) -> bool:
        try:
            return _digest(self._path, self._offset, self._size) == sha256
        except OSError:
            return False


# --- tgz --------------------------------------------------------------------------------------


class TgzSink:
    """A gzipped tar. Its entries come one after the other; a partial one is never continued.

    Args:
        path: a new file.
        level: of compression, 1 to 9.
    """

    parallel = False

    def __init__(self, path: Path, level: int) -> None:
        self._file = OutputFile(path)
        self._stream = GzipStream(self._file, level)
        self._position = 0  # in the tar, uncompressed

    def allocate(self, sizes: Mapping[str, int]) -> None:
        del sizes  # how far they shrink is not known

    def place(self, name: str, size: int) -> EntryPlace:
        header = tar_header(name, size)
        self._position += len(header) + _padded(size, tarfile.BLOCKSIZE)
        return _TgzPlace(self._stream, header, size)

    def finish(self) -> None:
        end = self._position + 2 * tarfile.BLOCKSIZE
        self._stream.write(memoryview(bytes(_padded(end, tarfile.RECORDSIZE) - self._position)))
        self._stream.finish()
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        self._stream.abandon()
        self._file.close()


class _TgzPlace:
    def __init__(self, stream: GzipStream, header: bytes, size: int) -> None:
        self._stream = stream
        self._header = header
        self._size = size

    def open(self, staging: Staging) -> EntryStream:
        del staging
        self._stream.write(memoryview(self._header))
        return _TgzStream(self._stream, -self._size % tarfile.BLOCKSIZE)

    def holds(self, sha256: str) -> bool:
        del sha256
        return False  # the file is new


class _TgzStream:
    def __init__(self, stream: GzipStream, padding: int) -> None:
        self._stream = stream
        self._padding = padding

    def write(self, data: memoryview) -> None:
        self._stream.write(data)

    def close(self) -> None:
        self._stream.write(memoryview(bytes(self._padding)))

    def abandon(self) -> None:
        pass


# --- the disk ---------------------------------------------------------------------------------


def _digest(path: Path, offset: int, size: int) -> str | None:
    """SHA-256 of a part of a file; None when the file ends before it."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size > 0:
            chunk = file.read(min(size, _READ_BYTES))
            if not chunk:
                return None
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()

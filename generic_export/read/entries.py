"""What lies in an archive, file after file, each to be read as a stream: nothing is unpacked.

In: a folder, a tar, gzipped or not; tract goes by the content, not the suffix. Out: `ArchiveEntry`s in the archive's order.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from zlib_ng import gzip_ng, zlib_ng

from generic_export.errors import ArchiveError
from generic_export.write.archive import ArchiveFormat

DAMAGED = "The archive is damaged or was not written to its end: export or copy it again."

_GZIP_MAGIC = b"\x1f\x8b"
_READ_BYTES = 1 << 20
_READS_AT_THE_END = 64  # tarfile ends with a few, of blocks that need not be there
# What the readers of the standard library raise on bytes that are no tar or no gzip.
READ_ERRORS: tuple[type[Exception], ...] = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    zlib_ng.error,
    struct.error,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
    OSError,
)  # type: ignore[assignment]


@dataclass(frozen=True)
class ArchiveEntry:
    """One file of an archive.

    Attributes:
        name: its path, `/` between folders, as stored (`./` in front included).
        size: its length in bytes.
        stream: at its start; to be read before the next entry is asked for.
    """

    name: str
    size: int
    stream: IO[bytes]


def archive_form(path: Path) -> ArchiveFormat:
    """Return what an archive is, by its content.

    Raises:
        ArchiveError: it is not there, or cannot be opened.
    """
    if path.is_dir():
        return ArchiveFormat.DIRECTORY
    try:
        with path.open("rb") as file:
            return ArchiveFormat.TGZ if file.read(2) == _GZIP_MAGIC else ArchiveFormat.TAR
    except FileNotFoundError:
        raise ArchiveError(f"{path}: no such archive.", "Use a folder, a .tar or a .tgz.") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read: {error.strerror or error}.") from error


def archive_entries(path: Path) -> Iterator[ArchiveEntry]:
    """Yield the files of an archive, in its order (of the names, for a folder).

    Of a folder or a tar only what is asked for is read; a gzipped tar is decompressed from start to end.

    Raises:
        ArchiveError: it is not there, or damaged. Damage inside an entry shows when its stream is read: see `readable`.
    """
    form = archive_form(path)
    with readable(path):
        if form is ArchiveFormat.DIRECTORY:
            yield from _folder_entries(path)
            return
        with path.open("rb") as file:
            yield from _gzip_entries(file) if form is ArchiveFormat.TGZ else _tar_entries(file)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what reading damaged bytes raises into an `ArchiveError` that names the archive."""
    try:
        yield
    except READ_ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ArchiveError(f"{path}: cannot be read as an archive: {reason}.", DAMAGED) from error


def _folder_entries(folder: Path) -> Iterator[ArchiveEntry]:
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        with path.open("rb") as file:
            yield ArchiveEntry(path.relative_to(folder).as_posix(), path.stat().st_size, file)


def _tar_entries(file: IO[bytes]) -> Iterator[ArchiveEntry]:
    """Yield the files of a plain tar, seeking over what is not asked for."""
    with _open_tar(file, "r:") as tar:
        yield from _members(tar)


def _gzip_entries(file: IO[bytes]) -> Iterator[ArchiveEntry]:
    """Yield the files of a gzipped tar, decompressing from start to end; the end holds the checksum."""
    with gzip_ng.open(file, "rb") as plain:
        stream = io.BufferedReader(plain, _READ_BYTES)
        with _open_tar(_Ending(stream), "r|") as tar:
            yield from _members(tar)
        while stream.read(_READ_BYTES):
            pass


class _Ending:
    """A stream that ends: tarfile skips a file by reading as often as its header wants, long after there is nothing left."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._empty = 0

    def read(self, size: int) -> bytes:
        """Return at most so many bytes.

        Raises:
            EOFError: there were none again and again.
        """
        data = self._stream.read(size)
        self._empty = 0 if data else self._empty + 1
        if self._empty > _READS_AT_THE_END:
            raise EOFError("it ends in the middle of a file")
        return data


class _StrictHeader(tarfile.TarInfo):
    """A header whose damage is an error. The library takes a damaged or missing one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _StrictHeader:
        try:
            header = super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"bad header: {error}") from None
        if tarfile_.offset <= header.offset:  # the library would read it again and again
            raise tarfile.ReadError(f"bad header: a file of {header.size} bytes")
        return header

    def _with_holes(self, *_: Any) -> NoReturn:
        """A few bytes announce terabytes of zeros, and the library reads the map of holes on for ever where it has no end.

        Raises:
            tarfile.ReadError: always.
        """
        raise tarfile.ReadError("a file is sparse, which no export writes")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _with_holes


def _open_tar(stream: IO[bytes] | _Ending, mode: Any) -> tarfile.TarFile:
    file: Any = stream  # of a stream ("r|") tarfile uses no more than `read`
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_StrictHeader, encoding="utf-8", errors="surrogateescape")


def _members(tar: tarfile.TarFile) -> Iterator[ArchiveEntry]:
    for member in tar:
        stream = tar.extractfile(member) if member.isfile() else None
        if stream is not None:
            yield ArchiveEntry(member.name, member.size, stream)

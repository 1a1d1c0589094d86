"""An NNEF archive looked at from outside: its graph's text, and every tensor by its header, no tensor data kept.

In: a folder, `.tar` or `.tgz`; files are read as streams and never unpacked to the disk. Out: `ArchiveContents`.
Layout as in `archive.py`; element codes of tract 0.23.9 (nnef/src/tensors.rs).
"""

from __future__ import annotations

import io
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from zlib_ng import gzip_ng, zlib_ng

from generic_export.errors import ArchiveError, TensorFormatError
from generic_export.nnef.archive import GRAPH_FILE, ArchiveFormat
from generic_export.nnef.dat import BLOCK_BITS, HEADER_BYTES, TRACT_VENDOR, DatHeader, parse_header

_GZIP_MAGIC = b"\x1f\x8b"
_LARGEST_GRAPH = 1 << 28  # bytes; the graph of a 100-layer model takes two million
_READ_BYTES = 1 << 20
_DAMAGED = "The archive is damaged or was not written to its end: export or copy it again."
# Item type -> name, values a block, bytes a block: tract's block-quantised tensors.
_BLOCKS = {0x3040: ("q4_0", 32, 18), 0x2040: ("q4_0_legacy", 32, 18), 0x3080: ("q8_1", 32, 36)}
_STRING = 0x1000
_FAMILIES = {0: "f", 1: "u", 2: "u", 3: "i", 4: "i"}
# What the readers of the standard library raise on bytes that are no tar or no gzip.
_READ_ERRORS = (
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
)


@dataclass(frozen=True)
class StoredTensor:
    """One `.dat` of an archive.

    Attributes:
        label: its path without `.dat`, which is what the graph calls it.
        shape: dimensions as stored.
        dtype: tract's name, "f16", "i64", "bool", or a block format, "q4_0"; "unknown(...)" for a code that is none.
        data_bytes: of the values, header excluded.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    data_bytes: int

    @property
    def elements(self) -> int:
        """How many values it holds."""
        return math.prod(self.shape)

    @property
    def bits_per_value(self) -> float:
        """Bits that one value takes on the disk, scales of its block included; 0 for an empty tensor."""
        return self.data_bytes * 8 / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class ArchiveContents:
    """What lies in an archive.

    Attributes:
        path: where it was read.
        format: folder, tar or tgz.
        stored_bytes: its size on the disk.
        graph_text: `graph.nnef`.
        tensors: every `.dat` that tract would load, in the order of the archive (of the names, for a folder).
        other_files: path and size of everything else; tract ignores most of it.
    """

    path: Path
    format: ArchiveFormat
    stored_bytes: int
    graph_text: str
    tensors: tuple[StoredTensor, ...]
    other_files: tuple[tuple[str, int], ...] = ()


def read_contents(path: str | os.PathLike[str]) -> ArchiveContents:
    """Read an archive's graph and tensor headers.

    A folder or a tar costs a few kilobytes a tensor, whatever the tensors' sizes; a tgz is decompressed once.

    Args:
        path: a folder with `graph.nnef` in it, or a tar, gzipped or not; tract goes by the content, not the suffix.

    Raises:
        ArchiveError: there is nothing, it is no archive, it is truncated, or it has no `graph.nnef`.
        TensorFormatError: a `.dat` in it is malformed, or shorter or longer than its header says.
    """
    path = Path(path)
    if path.is_dir():
        return _contents_of(path, _folder_entries(path), ArchiveFormat.DIRECTORY)
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if gzipped:
                return _contents_of(path, _gzip_entries(file), ArchiveFormat.TGZ)
            return _contents_of(path, _tar_entries(file), ArchiveFormat.TAR)
    except FileNotFoundError:
        raise ArchiveError(f"{path}: no such archive.", "Give a folder, a .tar or a .tgz.") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read: {error.strerror or error}.") from error


# --- entries: name, size, and a way to read the start ---------------------------------------------


@dataclass(frozen=True)
class _Entry:
    name: str
    size: int
    stream: IO[bytes]


def _folder_entries(folder: Path) -> Iterator[_Entry]:
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        with path.open("rb") as file:
            yield _Entry(path.relative_to(folder).as_posix(), path.stat().st_size, file)


def _tar_entries(file: IO[bytes]) -> Iterator[_Entry]:
    """Yield the files of a plain tar, seeking over what is not asked for."""
    with _open_tar(file, "r:") as tar:
        yield from _members(tar)


def _gzip_entries(file: IO[bytes]) -> Iterator[_Entry]:
    """Yield the files of a gzipped tar, decompressing from start to end; the end holds the checksum."""
    with gzip_ng.open(file, "rb") as plain:
        stream = io.BufferedReader(plain, _READ_BYTES)
        with _open_tar(stream, "r|") as tar:
            yield from _members(tar)
        while stream.read(_READ_BYTES):
            pass


class _StrictHeader(tarfile.TarInfo):
    """A header whose damage is an error. The library takes a damaged or missing one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _StrictHeader:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"bad header: {error}") from None


def _open_tar(stream: IO[bytes], mode: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=stream, mode=mode, tarinfo=_StrictHeader, encoding="utf-8", errors="surrogateescape")


def _members(tar: tarfile.TarFile) -> Iterator[_Entry]:
    for member in tar:
        stream = tar.extractfile(member) if member.isfile() else None
        if stream is not None:
            yield _Entry(member.name, member.size, stream)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the readers raise on damaged bytes into an `ArchiveError`."""
    try:
        yield
    except _READ_ERRORS as error:  # type: ignore[misc]
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ArchiveError(f"{path}: cannot be read as an archive: {reason}.", _DAMAGED) from error


# --- what is kept of them ---------------------------------------------------------------------------


class _Collector:
    """Takes the entries of one archive one after another, reading only what is wanted of each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._graph: str | None = None
        self._tensors: list[StoredTensor] = []
        self._others: list[tuple[str, int]] = []

    def take(self, entry: _Entry) -> None:
        name = entry.name.removeprefix("./")
        hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)  # tract passes over them
        if not hidden and name == GRAPH_FILE:
            self._graph = self._read_graph(entry)
        elif not hidden and name.endswith(".dat"):
            self._tensors.append(self._read_tensor(name, entry))
        else:
            self._others.append((name, entry.size))

    def contents(self, form: ArchiveFormat, stored_bytes: int) -> ArchiveContents:
        if self._graph is None:
            inside = next((name for name, _ in self._others if name.endswith(f"/{GRAPH_FILE}")), None)
            hint = f"{inside} is a folder too deep." if inside else "Give an NNEF archive, or a folder that holds one."
            raise ArchiveError(f"{self._path}: no {GRAPH_FILE} in it.", hint)
        return ArchiveContents(self._path, form, stored_bytes, self._graph, tuple(self._tensors), tuple(self._others))

    def _read_graph(self, entry: _Entry) -> str:
        if entry.size > _LARGEST_GRAPH:
            raise ArchiveError(f"{self._path}: {GRAPH_FILE} says it is {entry.size} bytes long.", _DAMAGED)
        data = entry.stream.read(entry.size)
        if len(data) != entry.size:
            raise ArchiveError(f"{self._path}: {GRAPH_FILE} ends after {len(data)} of {entry.size} bytes.", _DAMAGED)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArchiveError(f"{self._path}: {GRAPH_FILE} is not UTF-8 text: {error.reason}.", _DAMAGED) from error

    def _read_tensor(self, name: str, entry: _Entry) -> StoredTensor:
        where = f"{self._path}: {name}"
        header = parse_header(entry.stream.read(HEADER_BYTES), name=where)
        dtype = _checked_dtype(header, where)
        found = entry.size - HEADER_BYTES
        if found != header.data_size:
            raise TensorFormatError(
                f"{where}: holds {found} bytes of values, its header announces {header.data_size}.", _DAMAGED
            )
        return StoredTensor(name.removesuffix(".dat"), header.shape, dtype, header.data_size)


def _contents_of(path: Path, entries: Iterator[_Entry], form: ArchiveFormat) -> ArchiveContents:
    collector = _Collector(path)
    with _readable(path):
        for entry in entries:
            collector.take(entry)
        files = path.rglob("*") if path.is_dir() else (path,)
        stored_bytes = sum(file.stat().st_size for file in files if file.is_file())
    return collector.contents(form, stored_bytes)


def _checked_dtype(header: DatHeader, name: str) -> str:
    """Return the element type's name; a block format's size is checked against its shape."""
    if header.vendor == TRACT_VENDOR and header.item_type in _BLOCKS and header.bits == BLOCK_BITS:
        dtype, values, size = _BLOCKS[header.item_type]
        elements = math.prod(header.shape)
        if elements % values or elements // values * size != header.data_size:
            raise TensorFormatError(
                f"{name}: shape {list(header.shape)} in {dtype} does not take {header.data_size} bytes.", _DAMAGED
            )
        return dtype
    if header.vendor == TRACT_VENDOR and header.item_type == _STRING:
        return "string"
    if header.vendor == 0 and header.item_type == 5 and header.bits in (1, 8):
        return "bool"
    if header.vendor == 0 and header.item_type in _FAMILIES and header.bits in (8, 16, 32, 64):
        return f"{_FAMILIES[header.item_type]}{header.bits}"
    return f"unknown({header.vendor:#x}, {header.item_type:#x}, {header.bits:#x})"

"""An NNEF archive looked at from outside: its graph's text, and every tensor by its header, no tensor data kept.

In: a folder, `.tar` or `.tgz`; files are read as streams and never unpacked to the disk. Out: `ArchiveContents`.
Layout as in `archive.py`; element codes of tract 0.23.9 (nnef/src/tensors.rs).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from generic_export.errors import ArchiveError, TensorFormatError
from generic_export.nnef.dat import BLOCK_BITS, HEADER_BYTES, TRACT_VENDOR, DatHeader, parse_header
from generic_export.read.entries import DAMAGED, ArchiveEntry, archive_entries, archive_form, readable
from generic_export.write.archive import GRAPH_FILE, ArchiveFormat

_LARGEST_GRAPH = 1 << 28  # bytes; the graph of a 100-layer model takes two million
_LEGACY_Q4_0 = 0x2040  # read by tract, not written any more: values a block 32, bytes a block 18
_STRING = 0x1000
_FAMILIES = {0: "f", 1: "u", 2: "u", 3: "i", 4: "i"}


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
    collector = _Collector(path)
    with readable(path):
        form = archive_form(path)
        for entry in archive_entries(path):
            collector.take(entry)
        files = path.rglob("*") if path.is_dir() else (path,)
        stored_bytes = sum(file.stat().st_size for file in files if file.is_file())
    return collector.contents(form, stored_bytes)


# --- what is kept of them ---------------------------------------------------------------------------


class _Collector:
    """Takes the entries of one archive one after another, reading only what is wanted of each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._graph: str | None = None
        self._tensors: list[StoredTensor] = []
        self._others: list[tuple[str, int]] = []

    def take(self, entry: ArchiveEntry) -> None:
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
            hint = (
                f"{inside} is nested too deeply." if inside else "Use an NNEF archive, or a folder that contains one."
            )
            raise ArchiveError(f"{self._path}: it has no {GRAPH_FILE}.", hint)
        return ArchiveContents(self._path, form, stored_bytes, self._graph, tuple(self._tensors), tuple(self._others))

    def _read_graph(self, entry: ArchiveEntry) -> str:
        if entry.size > _LARGEST_GRAPH:
            raise ArchiveError(f"{self._path}: {GRAPH_FILE} claims {entry.size} bytes.", DAMAGED)
        data = entry.stream.read(entry.size)
        if len(data) != entry.size:
            raise ArchiveError(f"{self._path}: {GRAPH_FILE} ends after {len(data)} of {entry.size} bytes.", DAMAGED)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArchiveError(f"{self._path}: {GRAPH_FILE} is not UTF-8 text: {error.reason}.", DAMAGED) from error

    def _read_tensor(self, name: str, entry: ArchiveEntry) -> StoredTensor:
        where = f"{self._path}: {name}"
        header = parse_header(entry.stream.read(HEADER_BYTES), name=where)
        dtype = _checked_dtype(header, where)
        found = entry.size - HEADER_BYTES
        if found != header.data_size:
            raise TensorFormatError(
                f"{where}: contains {found} bytes of values, but its header says {header.data_size}.", DAMAGED
            )
        return StoredTensor(name.removesuffix(".dat"), header.shape, dtype, header.data_size)


def _checked_dtype(header: DatHeader, name: str) -> str:
    """Return the element type's name; a block format's size has been checked against its shape, save the legacy one's."""
    if header.block_format is not None:
        return header.block_format.name
    if header.vendor == TRACT_VENDOR and header.item_type == _LEGACY_Q4_0 and header.bits == BLOCK_BITS:
        if math.prod(header.shape) * 18 != header.data_size * 32:
            raise TensorFormatError(
                f"{name}: shape {list(header.shape)} in q4_0_legacy does not take {header.data_size} bytes.", DAMAGED
            )
        return "q4_0_legacy"
    if header.vendor == TRACT_VENDOR and header.item_type == _STRING:
        return "string"
    if header.vendor == 0 and header.item_type == 5 and header.bits in (1, 8):
        return "bool"
    if header.vendor == 0 and header.item_type in _FAMILIES and header.bits in (8, 16, 32, 64):
        return f"{_FAMILIES[header.item_type]}{header.bits}"
    return f"unknown({header.vendor:#x}, {header.item_type:#x}, {header.bits:#x})"

"""`--dry-run`: what an export would write, how much room and about how much time it would take.

In: the matched documents, of which no weight was read. Out: an `ExportPlan`, exact in bytes, an estimate in seconds.
The speed comes from a probe: a piece of memory cast, hashed and compressed, and an unnamed file on the target's disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from zlib_ng import zlib_ng

from generic_export.weights.source import CHUNK_BYTES
from generic_export.write.direct_file import STAGING_BYTES
from generic_export.write.document import ArchivePlan
from generic_export.write.gzip_stream import BLOCK_BYTES
from generic_export.write.worker_threads import THREADS

_PROBE_BYTES = 32 << 20
_SAMPLE_BYTES = 8 << 20
_CHUNKS_A_THREAD = 4  # as read, widened, cast, and one in the allocator
_RAW = -15


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind: those whose names differ in numbers only.

    Args:
        name: with `*` for the numbers.
        count: how many.
        shape, dtype: as written; each of them.
        bytes: of all of them, headers included.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class PlannedArchive:
    """One archive.

    Args:
        name: of its file or folder.
        bytes: its length; exact for a folder or a tar, the most it can take for a tgz.
        groups: its tensors.
    """

    name: str
    bytes: int
    groups: tuple[TensorGroup, ...]


@dataclass(frozen=True)
class ExportPlan:
    """What an export would do.

    Args:
        output_dir: the folder it would make.
        files: what would be in it.
        archives: the archives in it, the one that a runtime decodes with last.
        exact: whether their lengths are exact.
        free_bytes: on the target's disk now.
        peak_bytes: most memory the export takes, an estimate; of which `check_bytes` only while it checks.
        seconds: about how long reading, casting and writing takes; None when the disk could not be tried.
    """

    output_dir: Path
    files: tuple[str, ...]
    archives: tuple[PlannedArchive, ...]
    exact: bool
    free_bytes: int
    peak_bytes: int
    check_bytes: int
    seconds: float | None

    @property
    def archive(self) -> str:
        """Name of the archive, or of several the one that a runtime decodes with."""
        return self.archives[-1].name

    @property
    def archive_bytes(self) -> int:
        """Length of the archives together."""
        return sum(archive.bytes for archive in self.archives)

    @property
    def groups(self) -> tuple[TensorGroup, ...]:
        """The tensors of all archives."""
        return tuple(group for archive in self.archives for group in archive.groups)

    def asdict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        together = {
            "archive": self.archive,
            "archive_bytes": self.archive_bytes,
            "groups": list(map(asdict, self.groups)),
        }
        return asdict(self) | together | {"output_dir": str(self.output_dir)}


def make_plan(
    documents: Mapping[str, ArchivePlan],
    output_dir: Path,
    files: Sequence[str],
    *,
    compression_level: int | None,
    check_bytes: int = 0,
) -> ExportPlan:
    """Measure documents, try the disk, and say what an export would do.

    Args:
        documents: what would be written, by the names of the archives.
        output_dir: where.
        files: the other files in it.
        compression_level: None for folders, 0 for tars, 1 to 9 for tgz.
        check_bytes: memory that the check would take beyond what writing takes.
    """
    disk = _nearest_folder(output_dir)
    archives = tuple(
        PlannedArchive(
            name, document.total_bytes if compression_level is None else document.tar_bytes, tensor_groups(document)
        )
        for name, document in documents.items()
    )
    buffers = THREADS * (STAGING_BYTES + _CHUNKS_A_THREAD * CHUNK_BYTES)
    return ExportPlan(
        output_dir=output_dir,
        files=(*documents, *files),
        archives=archives,
        exact=not compression_level,
        free_bytes=shutil.disk_usage(disk).free,
        peak_bytes=psutil.Process().memory_info().rss + max(buffers, check_bytes),
        check_bytes=check_bytes,
        seconds=_estimate(sum(archive.bytes for archive in archives), disk, compression_level),
    )


def tensor_groups(document: ArchivePlan) -> tuple[TensorGroup, ...]:
    """Gather tensors of one name (but for numbers), shape and element type, in the archive's order."""
    groups: dict[tuple[str, tuple[int, ...], str], tuple[int, int]] = {}
    sizes = list(document.sizes.values())[1:]
    for (label, source), size in zip(document.tensors, sizes, strict=True):
        dtype = str(source.dtype).removeprefix("torch.")
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", label), tuple(source.shape), dtype
        count, total = groups.get(key, (0, 0))
        groups[key] = count + 1, total + size
    return tuple(
        TensorGroup(name, count, shape, dtype, total) for (name, shape, dtype), (count, total) in groups.items()
    )


def _nearest_folder(path: Path) -> Path:
    folder = path.absolute().parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


# --- speed ------------------------------------------------------------------------------------


def _estimate(total: int, disk: Path, compression_level: int | None) -> float | None:
    """Seconds that `total` bytes take: the processor's part and the disk's overlap, the longer one counts."""
    writing = _disk_seconds(disk)
    if writing is None:
        return None
    cores = os.cpu_count() or 1
    computing = _seconds(_cast_and_hash) / cores
    if compression_level:
        computing += _seconds(lambda data: _compress(data, compression_level), BLOCK_BYTES) / cores
    return total * max(writing, computing)


def _seconds(work: Callable[[torch.Tensor], None], size: int = _SAMPLE_BYTES) -> float:
    """Seconds a byte that some work takes, on random weights."""
    data = torch.randn(size // 2).mul_(0.02).bfloat16()
    work(data)
    begin = time.perf_counter()
    work(data)
    return (time.perf_counter() - begin) / size


def _cast_and_hash(data: torch.Tensor) -> None:
    hashlib.sha256(torch.empty(data.shape, dtype=torch.float16).copy_(data).numpy().data).digest()


def _compress(data: torch.Tensor, level: int) -> None:
    compressor = zlib_ng.compressobj(level, zlib_ng.DEFLATED, _RAW)
    compressor.compress(data.half().numpy().data)
    compressor.flush()


def _disk_seconds(folder: Path) -> float | None:
    """Seconds a byte that writing takes; tried on a file without a name, which leaves nothing."""
    data = memoryview(bytes(CHUNK_BYTES))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            for _ in range(_PROBE_BYTES // CHUNK_BYTES):
                file.write(data)
            os.fsync(file.fileno())
            return (time.perf_counter() - begin) / _PROBE_BYTES
    except OSError:
        return None

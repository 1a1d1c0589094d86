"""Room 3, write: an `NnefGraph` and where its tensors' bytes come from go in, a whole archive comes out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from generic_export.errors import MissingTensorError, WeightError
from generic_export.nnef.dat import block_header_bytes, header_bytes
from generic_export.nnef.dtypes import TRACT_DTYPES
from generic_export.nnef.graph import NnefGraph, NnefVariable
from generic_export.nnef.text import graph_text
from generic_export.weights.source import BlockTensorSource, TensorSource
from generic_export.write.archive import GRAPH_FILE, ArchiveWriter, Entry, EntryDigest, Resume, WriteProgress
from generic_export.write.direct_file import Buffer
from generic_export.write.sinks import tar_size

_SUFFIX = ".dat"


@dataclass(frozen=True)
class WrittenArchive:
    """An archive that is in place.

    Args:
        path: where.
        nbytes: its length on the disk, or that of the files in it.
        tensors: label, or `graph.nnef`, -> length and SHA-256 of the file in the archive.
    """

    path: Path
    nbytes: int
    tensors: Mapping[str, EntryDigest]


@dataclass(frozen=True)
class ArchivePlan:
    """A document and its tensors, matched and measured, nothing read yet: what `write_document` writes.

    Args:
        text: of `graph.nnef`.
        tensors: each variable's label with its source, in order.
        sizes: file name in the archive -> length in bytes, `graph.nnef` first.
    """

    text: bytes
    tensors: tuple[tuple[str, TensorSource], ...]
    sizes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Length of all files."""
        return sum(self.sizes.values())

    @property
    def tar_bytes(self) -> int:
        """Length of the uncompressed tar."""
        return tar_size(self.sizes)

    def entries(self) -> list[Entry]:
        """What the archive writer takes."""
        sources: list[Callable[[], Iterable[Buffer]]] = [lambda: (self.text,)]
        sources += [partial(_dat_chunks, label, source) for label, source in self.tensors]
        return [Entry(name, size, chunks) for (name, size), chunks in zip(self.sizes.items(), sources, strict=True)]

    def digest(self) -> str:
        """Text that two plans share exactly when graph, names and sizes are the same; of the weights it knows nothing."""
        return hashlib.sha256(self.text + json.dumps(list(self.sizes.items())).encode()).hexdigest()


def match_sources(graph: NnefGraph, sources: Mapping[str, TensorSource]) -> tuple[tuple[str, TensorSource], ...]:
    """Return the label and the source of each variable of a document.

    Raises:
        MissingTensorError: a variable has no source.
        WeightError: a source has another shape or element type than its variable.
    """
    return tuple((variable.label, _matching_source(variable, sources)) for variable in graph.variables)


def plan_document(graph: NnefGraph, sources: Mapping[str, TensorSource]) -> ArchivePlan:
    """Match a document's variables with their sources.

    Args:
        graph: the document; its variables name the tensors, their shapes and element types.
        sources: a source per label, already of the variable's element type.

    Raises:
        MissingTensorError: a variable has no source.
        WeightError: a source has another shape or element type than its variable.
        TensorFormatError: a tensor is above what a `.dat` file holds; the message names it and says what to do.
    """
    text = graph_text(graph).encode()
    matched = match_sources(graph, sources)
    sizes = {f"{label}{_SUFFIX}": len(_header(source, label)) + source.nbytes for label, source in matched}
    return ArchivePlan(text, matched, {GRAPH_FILE: len(text)} | sizes)


def write_document(
    path: Path,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    *,
    compression_level: int | None = 0,
    overwrite: bool = False,
    progress: Callable[[WriteProgress], None] | None = None,
    resume: Resume | None = None,
) -> WrittenArchive:
    """Write `graph.nnef` and one `.dat` per variable, streaming, and put the archive in place when it is whole.

    Args:
        path: target, see `write.output_path.archive_format_of` for suffixes.
        graph, sources: see `plan_document`. A source that several variables share is written for each of them.
        compression_level: None for a directory, 0 for `.tar`, 1-9 for `.tgz`.
        overwrite: replace an existing archive.
        progress: told now and then how far it is.
        resume: makes an export that was cut short continuable; its identity must cover the weights, what the graph
            says and the tensors' sizes are added here.

    Raises:
        MissingTensorError, WeightError, TensorFormatError: see `plan_document`; nothing was written.
        ArchiveError: the archive cannot be written; nothing is left behind.
    """
    plan = plan_document(graph, sources)
    needed = None if compression_level else plan.tar_bytes
    if resume is not None:
        resume = replace(resume, identity=f"{resume.identity} {plan.digest()} {compression_level}")
    with ArchiveWriter(path, compression_level, overwrite=overwrite, needed_bytes=needed, resume=resume) as writer:
        writer.add_all(plan.entries(), progress)
        writer.commit()
    tensors = {name.removesuffix(_SUFFIX): writer.digests[name] for name in plan.sizes}
    nbytes = plan.total_bytes if writer.path.is_dir() else writer.path.stat().st_size
    return WrittenArchive(writer.path, nbytes, tensors)


def _matching_source(variable: NnefVariable, sources: Mapping[str, TensorSource]) -> TensorSource:
    source = sources.get(variable.label)
    if source is None:
        raise MissingTensorError(f"no source for tensor {variable.label!r} of shape {list(variable.shape)}.")
    if tuple(source.shape) != variable.shape:
        raise WeightError(
            f"tensor {variable.label!r}: the model needs shape {list(variable.shape)}, but its source has "
            f"{list(source.shape)}.",
            "The checkpoint does not fit this config.",
        )
    stored = _stored_type(source)
    if stored != variable.dtype:
        raise WeightError(f"tensor {variable.label!r}: the graph needs {variable.dtype}, but its source has {stored}.")
    return source


def _stored_type(source: TensorSource) -> str:
    """Return the graph's name for how a source stores its values: an element type or a block format."""
    if isinstance(source, BlockTensorSource):
        return source.block_format
    return TRACT_DTYPES.get(source.dtype, str(source.dtype))


def _header(source: TensorSource, label: str) -> bytes:
    if isinstance(source, BlockTensorSource):
        return block_header_bytes(source.shape, source.block_format, name=label)
    return header_bytes(source.shape, source.dtype, name=label)


def _dat_chunks(label: str, source: TensorSource) -> Iterable[Buffer]:
    return chain((_header(source, label),), source.chunks())

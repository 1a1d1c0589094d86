"""Room 3, write: an `NnefGraph` and where its tensors' bytes come from go in, a whole archive comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from generic_export.errors import MissingTensorError, WeightError
from generic_export.nnef.archive import GRAPH_FILE, ArchiveWriter
from generic_export.nnef.dat import HEADER_BYTES, block_header_bytes, header_bytes
from generic_export.nnef.graph import NnefGraph, NnefVariable
from generic_export.nnef.text import graph_text
from generic_export.ops.builder import TRACT_DTYPES
from generic_export.weights.source import BlockTensorSource, TensorSource

Progress = Callable[[str, int, int], None]
"""Called before each tensor with its label, the bytes written so far and the bytes in all."""


def write_document(
    path: Path,
    graph: NnefGraph,
    sources: Mapping[str, TensorSource],
    *,
    compression_level: int | None = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write `graph.nnef` and one `.dat` per variable, streaming, and put the archive in place when it is whole.

    Args:
        path: target, see `nnef.archive.archive_format_of` for suffixes.
        graph: the document; its variables name the tensors, their shapes and element types.
        sources: a source per label, already of the variable's element type.
        compression_level: None for a directory, 0 for `.tar`, 1-9 for `.tgz`.
        overwrite: replace an existing archive.
        progress: told about each tensor before it is written.

    Returns:
        The path of the archive.

    Raises:
        MissingTensorError: a variable has no source.
        WeightError: a source has another shape or element type than its variable.
        ArchiveError: the archive cannot be written; nothing is left behind.
    """
    text = graph_text(graph).encode()
    matched = [(variable, _matching_source(variable, sources)) for variable in graph.variables]
    headers = [_header(source) for _, source in matched]
    sizes = [HEADER_BYTES + source.nbytes for _, source in matched]
    total = len(text) + sum(sizes)
    needed = None if compression_level else total + 1024 * (len(sizes) + 8)
    with ArchiveWriter(path, compression_level, overwrite=overwrite, needed_bytes=needed) as writer:
        writer.add_bytes(GRAPH_FILE, text)
        done = len(text)
        for (variable, source), header, size in zip(matched, headers, sizes, strict=True):
            if progress is not None:
                progress(variable.label, done, total)
            writer.add_stream(f"{variable.label}.dat", size, chain((header,), source.chunks()))
            done += size
        if progress is not None:
            progress("", total, total)
        writer.commit()
        return writer.path


def _matching_source(variable: NnefVariable, sources: Mapping[str, TensorSource]) -> TensorSource:
    source = sources.get(variable.label)
    if source is None:
        raise MissingTensorError(f"no source for tensor {variable.label!r} of shape {list(variable.shape)}.")
    if tuple(source.shape) != variable.shape:
        raise WeightError(
            f"tensor {variable.label!r}: the model needs shape {list(variable.shape)}, "
            f"its source has {list(source.shape)}.",
            "The checkpoint does not belong to this config.",
        )
    stored = _stored_type(source)
    if stored != variable.dtype:
        raise WeightError(f"tensor {variable.label!r}: the graph reads {variable.dtype}, its source has {stored}.")
    return source


def _stored_type(source: TensorSource) -> str:
    """Return the graph's name for how a source stores its values: an element type or a block format."""
    if isinstance(source, BlockTensorSource):
        return source.block_format
    return TRACT_DTYPES.get(source.dtype, str(source.dtype))


def _header(source: TensorSource) -> bytes:
    if isinstance(source, BlockTensorSource):
        return block_header_bytes(source.shape, source.block_format, name=source.name)
    return header_bytes(source.shape, source.dtype, name=source.name)

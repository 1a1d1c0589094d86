"""The bytes of a `TensorSource` as torch values: all of them, or chunk by chunk."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence

import torch

from generic_export.errors import WeightError
from generic_export.interrupts import raise_if_interrupted
from generic_export.weights.source import TensorSource

ROW_PIECE_VALUES = 1 << 18  # what is computed from a piece stays in a core's cache
_OWN_PAGES_BYTES = 1 << 20  # tensors from here on get memory pages of their own


def value_pieces(source: TensorSource) -> Iterator[torch.Tensor]:
    """Yield a source's values in order, as flat tensors of its dtype, a chunk each.

    Raises:
        WeightError: whatever the source raises, or a chunk that splits a value.
    """
    for chunk in source.chunks():
        raise_if_interrupted()
        if len(chunk) % source.dtype.itemsize:
            dtype = str(source.dtype).removeprefix("torch.")
            raise WeightError(f"tensor {source.name}: a chunk of {len(chunk)} bytes splits a {dtype} value.")
        if len(chunk):
            yield values_of(chunk, source.dtype)


def values_of(data: bytearray | memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as a flat tensor that shares their memory, unless that is read-only."""
    # torch.frombuffer warns about memory it may not write to, although nothing here does.
    readonly = isinstance(data, memoryview) and data.readonly
    return torch.frombuffer(bytearray(data) if readonly else data, dtype=dtype)


def row_pieces(source: TensorSource, length: int, values: int = ROW_PIECE_VALUES) -> Iterator[torch.Tensor]:
    """Yield a source's values as tensors [rows, length] of its own dtype, all but the last of about `values` values."""
    row_bytes = length * source.dtype.itemsize
    piece_bytes = max(1, values // length) * row_bytes
    rest = bytearray()
    for chunk in source.chunks():
        raise_if_interrupted()
        start = 0
        if rest:
            start = min(piece_bytes - len(rest), len(chunk))
            rest += chunk[:start]
            if len(rest) < piece_bytes:
                continue
            yield _rows(rest, source.dtype, length)
        # Pieces that lie within one chunk are not copied.
        while len(chunk) - start >= piece_bytes:
            yield _rows(chunk[start : start + piece_bytes], source.dtype, length)
            start += piece_bytes
        rest = bytearray(chunk[start:])
    if rest:
        yield _rows(rest, source.dtype, length)


def _rows(data: bytearray | memoryview, dtype: torch.dtype, length: int) -> torch.Tensor:
    return values_of(data, dtype).reshape(-1, length)


def read_tensor(source: TensorSource, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Read a whole source into a CPU tensor, cast chunk by chunk: never two whole copies at a time.

    Args:
        source: plain values (not blocks).
        dtype: of the result; None keeps the source's.

    Raises:
        WeightError: whatever the source raises, or fewer values than its shape promises.
    """
    values = _allocate(source.shape, dtype or source.dtype)
    flat, filled = values.view(-1), 0
    for piece in value_pieces(source):
        flat[filled : filled + len(piece)].copy_(piece)
        filled += len(piece)
    if filled != flat.numel():
        raise WeightError(f"tensor {source.name}: {filled} values were read, but its shape has {flat.numel()}.")
    return values


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor whose memory goes back to the system the moment it is dropped."""
    size = math.prod(shape) * dtype.itemsize
    if size < _OWN_PAGES_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    # glibc keeps freed blocks of up to 32 MiB, and aligned ones of equal size do not fit where one was freed: tensors
    # that come and go would grow the process to the size of the model.
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(tuple(shape))

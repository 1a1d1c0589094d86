"""A tensor as bytes to come: its name, shape and dtype now, its values later, chunk by chunk.

In: a torch tensor, or a region of a file. Out: chunks of raw little-endian C-order bytes.
At most a few chunks exist at a time, so a 2 GiB tensor costs tens of MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.pinned_file import PinnedFile

DOWNLOAD_AGAIN = "Download the file again."
CHUNK_BYTES = 4 * 1024 * 1024  # a chunk, its cast and its hash stay in the processor's cache


@runtime_checkable
class TensorSource(Protocol):
    """What every room downstream knows of a weight: metadata, and a stream of its bytes."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int:
        """Total length of the chunks, in bytes."""
        ...

    def chunks(self) -> Iterator[memoryview]:
        """The raw bytes in order: little-endian, C order, each chunk a whole number of elements.

        A chunk is the consumer's to keep (a writer queues several): a source never reuses its memory. It may be a
        view of the tensor itself, so it must not be written to. Every call streams from the start again.
        """
        ...


@runtime_checkable
class BlockTensorSource(TensorSource, Protocol):
    """A tensor in a block format: `shape` is of its values, `dtype` float32 as the engine sees it, `chunks()` blocks."""

    @property
    def block_format(self) -> str:
        """Name of one of `nnef.dat.BLOCK_FORMATS`, such as `q4_0`."""
        ...


class PlainValues:
    """Base of sources whose bytes are their values: how many bytes follows from shape and dtype."""

    @property
    def nbytes(self: _Shaped) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class DerivedTensor(PlainValues):
    """Base of sources made of another one, their `source`: of its name and shape, unless they say otherwise."""

    @property
    def name(self: _Derived) -> str:
        return self.source.name

    @property
    def shape(self: _Derived) -> tuple[int, ...]:
        return self.source.shape


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class _Derived(Protocol):
    @property
    def source(self) -> TensorSource: ...


@runtime_checkable
class SelfStored(Protocol):
    """A tensor subclass that says itself how its values are stored, such as `quant.QTensor`."""

    def stored_source(self, name: str) -> TensorSource:
        """The source of the bytes, under that name."""
        ...


@dataclass(frozen=True, eq=False)
class InMemoryBlocks:
    """A tensor whose blocks are already in memory.

    Args:
        name: the tensor's name.
        shape: of its values.
        block_format: such as `q4_0`.
        blob: uint8, contiguous; the blocks in row order.
    """

    name: str
    shape: tuple[int, ...]
    block_format: str
    blob: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def nbytes(self) -> int:
        return self.blob.numel()

    def chunks(self) -> Iterator[memoryview]:
        return InMemoryTensor(self.name, self.blob).chunks()


@dataclass(frozen=True, eq=False)
class LikeTensor(PlainValues):
    """What is the same of every source that streams the values of a torch tensor, under a name of its own."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass(frozen=True, eq=False)
class InMemoryTensor(LikeTensor):
    """A torch tensor that is already in memory, of any dtype (bf16 included) and any strides.

    A contiguous CPU tensor is streamed without a copy; another layout is made contiguous piece by piece.

    Raises:
        WeightError: the tensor has no values to stream (meta device, sparse).
    """

    def __post_init__(self) -> None:
        if self.tensor.device.type == "meta":
            raise WeightError(f"tensor {self.name}: it is on the meta device and has no values.", "Load it first.")
        if self.tensor.layout is not torch.strided:
            raise WeightError(
                f"tensor {self.name}: the layout {self.tensor.layout} is not supported.", "Use to_dense()."
            )

    def chunks(self) -> Iterator[memoryview]:
        for piece in _contiguous_pieces(self.tensor.detach()):
            # as_strided, not reshape: a single value may carry any stride, and view(dtype) wants 1.
            data = piece.as_strided((piece.numel(),), (1,)).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]


@dataclass(frozen=True)
class FileTensor(PlainValues):
    """A tensor stored as plain bytes in a region of a file.

    Args:
        name: the tensor's name, for errors and look-up.
        path: the file.
        offset: first byte of the region, from the start of the file.
        shape, dtype: how to read the region; its length is their product.
        file: the file, where it is open already; else it is opened whenever the tensor is streamed.
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: PinnedFile | None = field(default=None, kw_only=True, compare=False, repr=False)

    def chunks(self) -> Iterator[memoryview]:
        """The region's bytes, read as they are asked for.

        Raises:
            CorruptCheckpointError: the file is gone, or ends before the tensor does.
            WeightError: the file cannot be read (permission, input/output error).
        """
        try:
            file = self.file or PinnedFile(self.path)
            for done in range(0, self.nbytes, CHUNK_BYTES):
                # np.empty does not clear what is about to be overwritten, as bytearray does; and unlike torch.empty it
                # asks for no alignment, so that glibc puts the next chunk where the last one was freed.
                chunk = np.empty(min(CHUNK_BYTES, self.nbytes - done), np.uint8).data
                missing = file.fill(self.offset + done, chunk)
                if missing:
                    raise CorruptCheckpointError(
                        f"tensor {self.name}: {self.path} ends {missing + self.nbytes - done - len(chunk)} bytes "
                        f"before the tensor does ({self.nbytes} bytes from offset {self.offset}).",
                        DOWNLOAD_AGAIN,
                    )
                yield chunk
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"tensor {self.name}: {self.path} no longer exists.", DOWNLOAD_AGAIN
            ) from error
        except OSError as error:
            raise WeightError(f"tensor {self.name}: cannot read {self.path}: {error.strerror}.") from error


@dataclass(frozen=True, eq=False)
class RenamedTensor:
    """A source under another name, as when a tied table is stored twice: two tensors."""

    source: TensorSource
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def chunks(self) -> Iterator[memoryview]:
        return self.source.chunks()


def _contiguous_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's values in C order as contiguous CPU tensors; only pieces of about a chunk are ever copied."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if plain and tensor.device.type == "cpu":
        yield tensor
    elif tensor.dim() == 0 or tensor.numel() * tensor.dtype.itemsize <= CHUNK_BYTES:
        yield tensor.cpu().resolve_conj().resolve_neg().contiguous()
    else:
        row_bytes = tensor[0].numel() * tensor.dtype.itemsize
        if row_bytes > CHUNK_BYTES:
            for row in tensor:
                yield from _contiguous_pieces(row)
        else:
            step = CHUNK_BYTES // row_bytes
            for start in range(0, len(tensor), step):
                yield tensor[start : start + step].cpu().resolve_conj().resolve_neg().contiguous()

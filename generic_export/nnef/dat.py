"""The `.dat` tensor file: a 128-byte header, then the values, little-endian and in C order.

In: a torch tensor, or only its shape and dtype. Out: header bytes, sizes, or the tensor read back.
Format: NNEF 1.0 "tensor file format" with tract's item codes (tract 0.23.9, nnef/src/tensors.rs).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from generic_export.errors import TensorFormatError

HEADER_BYTES = 128
MAX_RANK = 8
MAX_DATA_BYTES = 2**32 - 1  # data_size_bytes is a u32
BLOCK_BITS = 0xFFFFFFFF  # bits_per_item of tract's block-quantised tensors and strings
TRACT_VENDOR = 0x5452  # 'T' << 8 | 'R'

_MOST_VALUES = (1 << 63) - 1  # strides of a tensor are int64, also of one that is empty along another axis
_MAGIC = b"\x4e\xef"
_VERSION = (1, 0)
# magic, version major and minor, data size, rank, dims, bits, item type, vendor; the rest is zero.
_LAYOUT = struct.Struct("<2sBBII8IIHH76x")


@dataclass(frozen=True)
class ElementType:
    """How one torch dtype is written: NNEF item type, bits per item, and vendor (0 = Khronos)."""

    dtype: torch.dtype
    item_type: int
    bits: int
    vendor: int = 0


ELEMENT_TYPES = (
    ElementType(torch.float16, 0, 16),
    ElementType(torch.float32, 0, 32),
    ElementType(torch.float64, 0, 64),
    ElementType(torch.uint8, 1, 8),
    ElementType(torch.uint16, 1, 16),
    ElementType(torch.uint32, 1, 32),
    ElementType(torch.uint64, 1, 64),
    ElementType(torch.int8, 3, 8),
    ElementType(torch.int16, 3, 16),
    ElementType(torch.int32, 3, 32),
    ElementType(torch.int64, 3, 64),
    ElementType(torch.bool, 5, 8),
)
_BY_DTYPE = {element.dtype: element for element in ELEMENT_TYPES}
_BY_CODE = {(element.vendor, element.item_type, element.bits): element for element in ELEMENT_TYPES}
_PLAIN_ITEM_TYPE = {2: 1, 4: 3}  # "quantised" unsigned and signed integers hold plain integers


@dataclass(frozen=True)
class BlockFormat:
    """How a block-quantised tensor is written: groups of values along the last axis, each a block of bytes.

    Attributes:
        name: what graphs and sources call it.
        item_type: code under tract's vendor number.
        group: values in a block.
        block_bytes: bytes of a block.
    """

    name: str
    item_type: int
    group: int
    block_bytes: int

    def data_size(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of that many values."""
        return math.prod(shape) // self.group * self.block_bytes


# Both in GGUF's byte order (tract 0.23.9, nnef/src/tensors.rs; tract itself writes Q8_1 as 0x3081, and cannot read that).
BLOCK_FORMATS = {
    block.name: block for block in (BlockFormat("q4_0", 0x3040, 32, 18), BlockFormat("q8_1", 0x3080, 32, 36))
}
_BLOCKS_BY_CODE = {block.item_type: block for block in BLOCK_FORMATS.values()}

_ACCEPTED = ", ".join(str(element.dtype).removeprefix("torch.") for element in ELEMENT_TYPES)
_REMEDIES = {
    torch.bfloat16: "tract has no bf16: cast it to float16 or float32.",
    torch.complex32: "Split it into real and imaginary parts with torch.view_as_real.",
    torch.complex64: "Split it into real and imaginary parts with torch.view_as_real.",
    torch.complex128: "Split it into real and imaginary parts with torch.view_as_real.",
}


@dataclass(frozen=True)
class DatHeader:
    """The fields of a `.dat` header.

    Args:
        shape: dimensions, outermost first; `()` is a scalar.
        data_size: payload length in bytes.
        item_type, bits, vendor: the element type's code; `bits` is `BLOCK_BITS` for block-quantised tensors.
    """

    shape: tuple[int, ...]
    data_size: int
    item_type: int
    bits: int
    vendor: int = 0

    def pack(self) -> bytes:
        """The 128 bytes that stand at the start of the file."""
        dims = (*self.shape, *[0] * (MAX_RANK - len(self.shape)))
        return _LAYOUT.pack(
            _MAGIC, *_VERSION, self.data_size, len(self.shape), *dims, self.bits, self.item_type, self.vendor
        )

    @property
    def block_format(self) -> BlockFormat | None:
        """The block format, or None for a plain tensor."""
        is_block = self.vendor == TRACT_VENDOR and self.bits == BLOCK_BITS
        return _BLOCKS_BY_CODE.get(self.item_type) if is_block else None

    def element_type(self, name: str = "tensor") -> ElementType:
        """The torch form of the element code.

        Raises:
            TensorFormatError: no torch dtype stores these items (block-quantised, string, complex, 1-bit bool).
        """
        code = (self.vendor, _PLAIN_ITEM_TYPE.get(self.item_type, self.item_type), self.bits)
        if self.vendor == 0 and code in _BY_CODE:
            return _BY_CODE[code]
        raise TensorFormatError(
            f"{name}: .dat item type {self.item_type:#x} (vendor {self.vendor:#x}, {self.bits:#x} bits per item) "
            "has no torch dtype.",
            f"Supported dtypes: {_ACCEPTED}.",
        )


def dat_size(shape: Sequence[int], dtype: torch.dtype, *, name: str = "tensor") -> int:
    """Length of the whole `.dat` file in bytes: header and payload.

    Raises:
        TensorFormatError: as `header_bytes`.
    """
    return HEADER_BYTES + _checked_header(shape, dtype, name).data_size


def header_bytes(shape: Sequence[int], dtype: torch.dtype, *, name: str = "tensor") -> bytes:
    """The 128-byte header of a plain (not block-quantised) tensor.

    Args:
        shape: dimensions, at most 8 of them.
        dtype: one of `ELEMENT_TYPES`; bool takes one byte a value.
        name: what to call the tensor in an error.

    Raises:
        TensorFormatError: the dtype has no `.dat` code, the rank is above 8, or the payload reaches 4 GiB.
    """
    return _checked_header(shape, dtype, name).pack()


def block_header_bytes(shape: Sequence[int], block_format: str, *, name: str = "tensor") -> bytes:
    """The 128-byte header of a block-quantised tensor.

    Args:
        shape: of its values; rank 2 to 8, the product of all dimensions but the first a multiple of the group.
        block_format: a name of `BLOCK_FORMATS`.
        name: what to call the tensor in an error.

    Raises:
        TensorFormatError: tract would refuse such a tensor, or the payload reaches 4 GiB.
    """
    return _checked_block_header(shape, block_format, name).pack()


def _checked_block_header(shape: Sequence[int], block_format: str, name: str) -> DatHeader:
    block = BLOCK_FORMATS.get(block_format)
    if block is None:
        raise TensorFormatError(
            f"{name}: block format {block_format!r} is unknown.", f"Known: {', '.join(BLOCK_FORMATS)}."
        )
    dims = tuple(shape)
    if not 2 <= len(dims) <= MAX_RANK or math.prod(dims[1:]) % block.group or not math.prod(dims):
        raise TensorFormatError(
            f"{name}: shape {list(dims)} has no {block_format} form, which needs 2 to {MAX_RANK} dimensions and "
            f"rows with a multiple of {block.group} values.",
            "Store it as f16 or f32.",
        )
    data_size = block.data_size(dims)
    if data_size > MAX_DATA_BYTES:
        raise TensorFormatError(
            f"{name}: shape {list(dims)} in {block_format} takes {data_size} bytes, but a .dat file holds at "
            f"most {MAX_DATA_BYTES}.",
            "Split it along its first axis.",
        )
    return DatHeader(dims, data_size, block.item_type, BLOCK_BITS, TRACT_VENDOR)


def parse_header(data: bytes | bytearray | memoryview, *, name: str = "tensor") -> DatHeader:
    """Read a header and check that its own fields agree.

    Args:
        data: at least the first 128 bytes of the file.
        name: what to call the file in an error.

    Raises:
        TensorFormatError: too short, not a `.dat` file, rank above 8, or dimensions that contradict the data size or each other.
    """
    if len(data) < HEADER_BYTES:
        raise TensorFormatError(
            f"{name}: a .dat header is {HEADER_BYTES} bytes long, found {len(data)}.", "Write the file again."
        )
    magic, major, minor, data_size, rank, *rest = _LAYOUT.unpack_from(data)
    dims, (bits, item_type, vendor) = rest[:MAX_RANK], rest[MAX_RANK:]
    if magic != _MAGIC:
        raise TensorFormatError(f"{name}: not an NNEF .dat file (it starts with {magic.hex()}, expected 4eef).")
    if (major, minor) != _VERSION:
        raise TensorFormatError(f"{name}: .dat version {major}.{minor} is not known, expected 1.0.")
    if rank > MAX_RANK:
        raise TensorFormatError(f"{name}: .dat header says rank {rank}, the format holds at most {MAX_RANK}.")
    header = DatHeader(tuple(dims[:rank]), data_size, item_type, bits, vendor)
    if math.prod(dim for dim in header.shape if dim) > _MOST_VALUES:
        raise TensorFormatError(
            f"{name}: .dat header has the invalid shape {list(header.shape)}.",
            "The file is damaged: write it again.",
        )
    if bits != BLOCK_BITS and math.prod(header.shape) * bits != data_size * 8:
        raise TensorFormatError(
            f"{name}: .dat header says {data_size} bytes, but shape {list(header.shape)} of {bits}-bit items "
            f"takes {math.prod(header.shape) * bits // 8}.",
            "The file is damaged: write it again.",
        )
    block = header.block_format
    if block is not None and (
        len(header.shape) < 2
        or math.prod(header.shape[1:]) % block.group
        or block.data_size(header.shape) != header.data_size
    ):
        raise TensorFormatError(
            f"{name}: .dat header says {data_size} bytes of {block.name} for shape {list(header.shape)}, which "
            f"needs rows with a multiple of {block.group} values and {block.data_size(header.shape)} bytes.",
            "The file is damaged: write it again.",
        )
    return header


@dataclass(frozen=True)
class DatBlocks:
    """A block-quantised tensor as read: what its header says, and its blocks.

    Attributes:
        header: shape of the values, and `header.block_format`.
        data: uint8 [bytes], the blocks in row order.
    """

    header: DatHeader
    data: torch.Tensor


def read_dat(path: str | os.PathLike[str]) -> torch.Tensor:
    """Read a plain `.dat` file into a CPU tensor.

    Raises:
        TensorFormatError: the file cannot be read, is truncated, longer than its header says, malformed, or
            block-quantised.
    """
    header, data = _read_whole(Path(path))
    dtype = header.element_type(str(path)).dtype
    values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return values.reshape(header.shape)


def read_block_dat(path: str | os.PathLike[str]) -> DatBlocks:
    """Read a block-quantised `.dat` file; its blocks are not interpreted.

    Raises:
        TensorFormatError: the file cannot be read, is truncated, longer than its header says, malformed, or not
            block-quantised.
    """
    header, data = _read_whole(Path(path))
    if header.block_format is None:
        raise TensorFormatError(
            f"{path}: .dat item type {header.item_type:#x} (vendor {header.vendor:#x}) is not one of the block "
            f"formats {', '.join(BLOCK_FORMATS)}.",
            "Read it with read_dat.",
        )
    return DatBlocks(header, torch.frombuffer(data, dtype=torch.uint8))


def _read_whole(path: Path) -> tuple[DatHeader, bytearray]:
    try:
        with path.open("rb") as file:
            header = parse_header(file.read(HEADER_BYTES), name=str(path))
            expected, found = HEADER_BYTES + header.data_size, path.stat().st_size
            if found != expected:  # known before any memory is asked for
                raise TensorFormatError(
                    f"{path}: {found} bytes long, but its header says {expected}.",
                    "The file is damaged: write it again.",
                )
            data = bytearray(header.data_size)
            if file.readinto(data) != header.data_size:
                raise TensorFormatError(f"{path}: the file shrank while it was read.")
    except OSError as error:
        raise TensorFormatError(f"{path}: cannot be read: {error.strerror}.") from error
    return header, data


def write_dat(path: str | os.PathLike[str], tensor: torch.Tensor) -> None:
    """Write one tensor as a `.dat` file.

    Args:
        path: file to create or replace.
        tensor: any strided tensor with a dtype of `ELEMENT_TYPES`.

    Raises:
        TensorFormatError: as `header_bytes`.
    """
    header = header_bytes(tensor.shape, tensor.dtype, name=str(path))
    values = tensor.detach().cpu().contiguous()
    # as_strided, not reshape: a single value may carry any stride, and view(dtype) wants 1.
    data = values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data
    with open(path, "wb") as file:
        file.write(header)
        file.write(data)


def _checked_header(shape: Sequence[int], dtype: torch.dtype, name: str) -> DatHeader:
    element = _BY_DTYPE.get(dtype)
    if element is None:
        raise TensorFormatError(
            f"{name}: {str(dtype).removeprefix('torch.')} has no .dat form.",
            _REMEDIES.get(dtype, f"Convert it to one of: {_ACCEPTED}."),
        )
    dims = tuple(shape)
    if not all(isinstance(dim, int) and dim >= 0 for dim in dims):
        raise TensorFormatError(f"{name}: the shape of a stored tensor must be static, got {list(dims)}.")
    if len(dims) > MAX_RANK:
        raise TensorFormatError(
            f"{name}: rank {len(dims)} is above the {MAX_RANK} dimensions of the .dat format.",
            "Store it with merged dimensions and reshape it in the graph.",
        )
    data_size = math.prod(dims) * element.bits // 8
    if data_size > MAX_DATA_BYTES or any(dim > MAX_DATA_BYTES for dim in dims):
        raise TensorFormatError(
            f"{name}: shape {list(dims)} in {str(dtype).removeprefix('torch.')} takes {data_size} bytes, "
            f"a .dat file holds at most {MAX_DATA_BYTES}.",
            "Store it in a smaller dtype, or split it along its first axis and concatenate the parts in the graph.",
        )
    return DatHeader(dims, data_size, element.item_type, element.bits, element.vendor)

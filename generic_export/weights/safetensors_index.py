"""One safetensors file, opened without reading a weight: tensor name -> region of the file.

In: a file. Out: a `FileTensor` for each tensor; every length is checked before it is believed.
Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, then the data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.pinned_file import PinnedFile
from generic_export.weights.source import DOWNLOAD_AGAIN, FileTensor

LFS_MAGIC = b"version "
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_MOST_DIMENSIONS = 64  # of a tensor; NumPy has no more either
_LARGEST_SIZE = (1 << 63) - 1

# dtype name -> torch dtype of the tensors that can be streamed.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# dtype name -> (torch dtype, bits per value) of those that are listed but not read.
_UNREADABLE = {
    "F8_E4M3": (torch.float8_e4m3fn, 8),
    "F8_E5M2": (torch.float8_e5m2, 8),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 8),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 8),
    "F8_E8M0": (torch.float8_e8m0fnu, 8),
    "F4": (torch.uint8, 4),
    "F6_E2M3": (torch.uint8, 6),
    "F6_E3M2": (torch.uint8, 6),
    "C64": (torch.complex64, 64),
}


@dataclass(frozen=True)
class UnreadableTensor(FileTensor):
    """A tensor in a format that nothing here decodes: it can be listed and left alone, not streamed.

    Args:
        stored_as: the safetensors dtype name, such as `F8_E4M3`; `dtype` is torch's name for it where torch has
            one, and uint8 where it has none.
        stored_bytes: length of the region in bytes.
    """

    stored_as: str
    stored_bytes: int

    @property
    def nbytes(self) -> int:
        return self.stored_bytes

    def chunks(self) -> Iterator[memoryview]:
        """Always refuses.

        Raises:
            WeightError: names the tensor and its stored dtype.
        """
        raise WeightError(
            f"tensor {self.name} in {self.path}: stored as {self.stored_as}, which cannot be read.",
            f"Convert the checkpoint to one of: {', '.join(DTYPES)} (for example load it in bfloat16 and save it).",
        )


def open_safetensors(path: Path, file: PinnedFile | None = None) -> dict[str, FileTensor]:
    """Where each tensor of one safetensors file lies, in file order; they are read from the file that is opened here.

    Args:
        path: the file.
        file: the same, where it is open already.

    Tensors whose dtype has no reader (8-bit floats and smaller, complex) are listed as `UnreadableTensor`.

    Raises:
        WeightError: there is no such file, or it cannot be read.
        CorruptCheckpointError: the file is truncated or its header is inconsistent.
    """
    path = Path(path)
    with reading(path):
        file = file or PinnedFile(path)
        header = _read_header(path, file)
    data_start, file_bytes = 8 + len(header), file.identity.bytes
    tensors = [replace(tensor, file=file) for tensor in _parse_entries(path, header, data_start)]
    announced = data_start + sum(tensor.nbytes for tensor in tensors)
    if announced > file_bytes:
        raise CorruptCheckpointError(
            f"{path}: truncated, {announced - file_bytes} of {announced} bytes are missing.", DOWNLOAD_AGAIN
        )
    if announced < file_bytes:
        raise _corrupt(path, f"{file_bytes - announced} bytes follow the last tensor")
    return {tensor.name: tensor for tensor in tensors}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of a checkpoint file that cannot be opened why.

    Raises:
        WeightError: there is no such file, or it cannot be read.
        CorruptCheckpointError: it is a link to nowhere.
    """
    try:
        yield
    except FileNotFoundError as error:
        if path.is_symlink():  # the Hugging Face cache links names to blobs
            raise CorruptCheckpointError(f"{path}: a broken link.", DOWNLOAD_AGAIN) from error
        raise WeightError(f"{path}: no such file.", "Check the path of the checkpoint.") from error
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror}.") from error


def require_weights(path: Path, start: bytes) -> None:
    """Refuse a file whose first bytes say that git left a pointer in its place."""
    if start.startswith(LFS_MAGIC):
        raise CorruptCheckpointError(f"{path}: a git-lfs pointer, not the weights.", "Run git lfs pull.")


def _corrupt(path: Path, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: damaged safetensors file: {reason}.", DOWNLOAD_AGAIN)


def _read_header(path: Path, file: PinnedFile) -> bytes:
    """The JSON header; its length is checked first."""
    file_bytes = file.identity.bytes
    prefix = file.read(0, 8)
    require_weights(path, prefix)
    if len(prefix) < 8:
        raise CorruptCheckpointError(
            f"{path}: truncated; it is {file_bytes} bytes long and at least {8 - len(prefix)} bytes are missing.",
            DOWNLOAD_AGAIN,
        )
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _corrupt(path, f"its header claims {header_bytes} bytes")
    if header_bytes > file_bytes - 8:
        raise CorruptCheckpointError(
            f"{path}: truncated in its header, at least {header_bytes + 8 - file_bytes} bytes are missing.",
            DOWNLOAD_AGAIN,
        )
    return file.read(8, header_bytes)


def _parse_entries(path: Path, header: bytes, data_start: int) -> list[FileTensor]:
    """The tensors a header lists, in file order; each starts where the one before ends."""
    try:
        table = json.loads(header, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise _corrupt(path, "its header is not a JSON object")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, "its metadata is not a table of strings")
    tensors = [_parse_entry(path, name, entry, data_start) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            raise _corrupt(
                path, f"tensor {tensor.name} starts at byte {tensor.offset} of the file, expected {position}"
            )
        position += tensor.nbytes
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> FileTensor:
    """One entry of the header, once its dtype, shape and offsets are known to agree."""
    if not isinstance(entry, dict):
        raise _corrupt(path, f"tensor {name} has no dtype, shape and data_offsets")
    stored_as, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _corrupt(path, f"tensor {name} has shape {_shown(shape)} and data_offsets {_shown(offsets)}")
    if not isinstance(stored_as, str):
        raise _corrupt(path, f"tensor {name} has dtype {_shown(stored_as)}")
    begin, nbytes = offsets[0], offsets[1] - offsets[0]
    if stored_as in DTYPES:
        dtype, bits = DTYPES[stored_as], DTYPES[stored_as].itemsize * 8
    else:
        dtype, bits = _UNREADABLE.get(stored_as, (torch.uint8, 0))  # 0: a dtype younger than this code
    if bits and math.prod(shape) * bits != nbytes * 8:
        raise _corrupt(path, f"tensor {name} of {stored_as} {shape} takes {nbytes} bytes")
    if stored_as in DTYPES:
        return FileTensor(name, path, data_start + begin, tuple(shape), dtype)
    return UnreadableTensor(name, path, data_start + begin, tuple(shape), dtype, stored_as, nbytes)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}..."


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    """Sizes as a file can have them; the product of many numbers of thousands of digits would take hours."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMENSIONS
        and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table

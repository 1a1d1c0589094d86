"""A safetensors checkpoint, opened without reading a weight: tensor name -> region of a file.

In: a folder or a file. Out: `Checkpoint`, a mapping of `FileTensor`; every length is checked before it is believed.
Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, then the data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch

from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.source import FileTensor

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

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

_DOWNLOAD_AGAIN = "Download the file again."
_CONVERT = (
    "Only safetensors checkpoints are read for now. Convert it with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
)
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")


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


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Args:
        tensors: name -> where the tensor lies.
        files: the safetensors files, in the order they were opened.
        total_bytes: bytes of all tensors as stored (headers not counted).
    """

    tensors: Mapping[str, FileTensor]
    files: tuple[Path, ...]
    total_bytes: int


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder or a single safetensors file; no weight is read.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors`, with a `*.safetensors.index.json` and its
            shards, or with one `.safetensors` file of another name (looked for in this order).

    Raises:
        WeightError: nothing there, or only other formats.
        CorruptCheckpointError: a file is truncated, missing, or contradicts the index.
    """
    path = Path(path)
    if path.is_dir():
        single = _find_single_file(path)
        if single is None:
            return _open_sharded(_find_index(path))
        path = single
    elif path.name.endswith(".safetensors.index.json"):
        return _open_sharded(path)
    elif path.suffix in _OTHER_FORMATS and path.exists():
        raise WeightError(f"{path}: not a safetensors file.", _CONVERT)
    tensors = open_safetensors(path)
    return _checkpoint(tensors, (path,))


def open_safetensors(path: Path) -> dict[str, FileTensor]:
    """Where each tensor of one safetensors file lies, in file order.

    Tensors whose dtype has no reader (8-bit floats and smaller, complex) are listed as `UnreadableTensor`.

    Raises:
        WeightError: there is no such file, or it cannot be read.
        CorruptCheckpointError: the file is truncated or its header is inconsistent.
    """
    path = Path(path)
    try:
        file_bytes, header = _read_header(path)
    except FileNotFoundError as error:
        if path.is_symlink():  # the Hugging Face cache links names to blobs
            raise CorruptCheckpointError(f"{path}: links to a file that is not there.", _DOWNLOAD_AGAIN) from error
        raise WeightError(f"{path}: no such file.", "Check the path of the checkpoint.") from error
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror}.") from error
    data_start = 8 + len(header)
    tensors = _parse_entries(path, header, data_start)
    announced = data_start + sum(tensor.nbytes for tensor in tensors)
    if announced > file_bytes:
        raise CorruptCheckpointError(
            f"{path}: truncated, {announced - file_bytes} of {announced} bytes are missing.", _DOWNLOAD_AGAIN
        )
    if announced < file_bytes:
        raise _corrupt(path, f"{file_bytes - announced} bytes follow the last tensor")
    return {tensor.name: tensor for tensor in tensors}


def _checkpoint(tensors: Mapping[str, FileTensor], files: tuple[Path, ...]) -> Checkpoint:
    return Checkpoint(tensors, files, sum(tensor.nbytes for tensor in tensors.values()))


def _corrupt(path: Path, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: damaged safetensors file: {reason}.", _DOWNLOAD_AGAIN)


# --- folders ----------------------------------------------------------------------------------


def _find_single_file(folder: Path) -> Path | None:
    """The one file that is the whole checkpoint; None when the folder has an index instead."""
    if (folder / "model.safetensors").exists():
        return folder / "model.safetensors"
    if any(folder.glob("*.safetensors.index.json")):
        return None
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found[:4]) + (", ..." if len(found) > 4 else "")
        raise WeightError(
            f"{folder}: {len(found)} safetensors files ({names}) and no model.safetensors.index.json to order them.",
            "Download the index as well, or give the path of one file.",
        )
    others = sorted(file.name for file in folder.iterdir() if file.suffix in _OTHER_FORMATS)
    if others:
        raise WeightError(f"{folder}: no safetensors file, only {', '.join(others[:4])}.", _CONVERT)
    raise WeightError(f"{folder}: no safetensors file in this folder.", "Check the path of the checkpoint.")


def _find_index(folder: Path) -> Path:
    if (folder / "model.safetensors.index.json").exists():
        return folder / "model.safetensors.index.json"
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise WeightError(
            f"{folder}: several index files ({', '.join(file.name for file in found)}).",
            "Give the path of one of them.",
        )
    return found[0]


def _open_sharded(index: Path) -> Checkpoint:
    """Open every shard an index names; what the index says and what the shards hold must agree."""
    weight_map = _read_weight_map(index)
    shards: dict[str, dict[str, FileTensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if not (index.parent / shard).exists():
            raise CorruptCheckpointError(
                f"{index.parent / shard}: this shard is missing, {index.name} expects "
                f"{sum(where == shard for where in weight_map.values())} tensors in it.",
                "Download the missing file into the same folder.",
            )
        shards[shard] = open_safetensors(index.parent / shard)
    holders: dict[str, list[str]] = {}
    for shard, held in shards.items():
        for name in held:
            holders.setdefault(name, []).append(shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            where = f"it is in {holders[name][0]}" if name in holders else "no shard holds it"
            raise CorruptCheckpointError(
                f"tensor {name}: {index} places it in {shard}, but {where}.",
                "The index and the shards come from different downloads: download the checkpoint again.",
            )
    tensors = {name: shards[shard][name] for name, shard in weight_map.items()}
    for name, candidates in holders.items():  # tensors the index does not list count too, as in transformers
        if name not in weight_map and len(candidates) > 1:
            raise CorruptCheckpointError(
                f"tensor {name}: not listed in {index} and held by several shards ({', '.join(candidates)}).",
                "Download the checkpoint again.",
            )
        tensors.setdefault(name, shards[candidates[0]][name])
    return _checkpoint(tensors, tuple(index.parent / shard for shard in shards))


def _read_weight_map(index: Path) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> shard path relative to the index, checked."""
    try:
        weight_map: Any = json.loads(index.read_bytes())["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except OSError as error:
        raise WeightError(f"{index}: cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{index}: not a safetensors index ({error!r}).", _DOWNLOAD_AGAIN) from error
    if not valid:
        raise CorruptCheckpointError(f"{index}: its weight_map is not a table of file names.", _DOWNLOAD_AGAIN)
    for shard in set(weight_map.values()):
        relative = PurePosixPath(shard)
        if not shard or "\0" in shard or relative.is_absolute() or ".." in relative.parts:
            raise CorruptCheckpointError(f"{index}: shard {shard!r} lies outside the checkpoint folder.")
    return dict(weight_map)


# --- one file ---------------------------------------------------------------------------------


def _read_header(path: Path) -> tuple[int, bytes]:
    """Length of the file in bytes, and the JSON header; the header length is checked first."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if prefix == b"version ":
            raise CorruptCheckpointError(f"{path}: a git-lfs pointer, not the weights.", "Run git lfs pull.")
        if len(prefix) < 8:
            raise CorruptCheckpointError(
                f"{path}: truncated, it is {file_bytes} bytes long and misses at least {8 - len(prefix)} bytes.",
                _DOWNLOAD_AGAIN,
            )
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise _corrupt(path, f"it announces a header of {header_bytes} bytes")
        if header_bytes > file_bytes - 8:
            raise CorruptCheckpointError(
                f"{path}: truncated in its header, at least {header_bytes + 8 - file_bytes} bytes are missing.",
                _DOWNLOAD_AGAIN,
            )
        return file_bytes, file.read(header_bytes)


def _parse_entries(path: Path, header: bytes, data_start: int) -> list[FileTensor]:
    """The tensors a header lists, in file order; each starts where the one before ends."""
    try:
        table = json.loads(header, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise _corrupt(path, "its header is not a JSON object")
    table.pop("__metadata__", None)
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
        raise _corrupt(path, f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}")
    begin, nbytes = offsets[0], offsets[1] - offsets[0]
    if stored_as in DTYPES:
        dtype, bits = DTYPES[stored_as], DTYPES[stored_as].itemsize * 8
    else:
        dtype, bits = _UNREADABLE.get(str(stored_as), (torch.uint8, 0))  # 0: a dtype younger than this code
    if bits and math.prod(shape) * bits != nbytes * 8:
        raise _corrupt(path, f"tensor {name} of {stored_as} {shape} takes {nbytes} bytes")
    if stored_as in DTYPES:
        return FileTensor(name, path, data_start + begin, tuple(shape), dtype)
    return UnreadableTensor(name, path, data_start + begin, tuple(shape), dtype, str(stored_as), nbytes)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table

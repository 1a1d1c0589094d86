"""One file of `torch.save`, opened without running anything that it contains: tensor name -> where its bytes lie.

In: a zip file (PyTorch 1.6 and later), whose tensors are regions of the file, or an older plain pickle, which is read
whole. Out: a `TensorSource` for each tensor of the file's state dict.
"""

from __future__ import annotations

import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generic_export.compat import FakeTensorMode, checkpoint_offset, sparse_values_unread
from generic_export.errors import CorruptCheckpointError, WeightError
from generic_export.weights.pinned_file import PinnedFile
from generic_export.weights.safetensors_index import LFS_MAGIC, UnreadableTensor, reading, require_weights
from generic_export.weights.source import DOWNLOAD_AGAIN, FileTensor, InMemoryTensor, TensorSource

_MAX_DEPTH = 8  # of dicts in dicts; a pickle can contain itself
_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # zip: lengths of the name and of the extra field, at the end of 30 bytes

_DEFLATE_RATIO = 1032  # at best: 258 bytes of output for two bits
_LARGEST_ALIGNMENT = 1 << 20  # bytes; torch.save writes 64

_SAVE_STATE_DICT = (
    "If you trust the file, load it with weights_only=False and save its state_dict() with safetensors.torch.save_file."
)
# How torch's restricted unpickler names what it will not import.
_REFUSED_GLOBAL = re.compile(
    r"(?:unsupported|Unsupported) (?:global: )?GLOBAL ([\w.]+)|class ([\w.]+) was not an allowed"
)
_LEGACY_PICKLES = 5  # magic number, protocol, system, content, storage keys; then come the values
_PICKLE_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")


@dataclass(frozen=True)
class _Record:
    """Where one entry of a zip file keeps its bytes."""

    nbytes: int
    is_plain: bool


def open_torch_file(path: Path, file: PinnedFile | None = None) -> dict[str, TensorSource]:
    """Where each tensor of one `torch.save` file lies, in the order of its state dict.

    Args:
        path: the file.
        file: the same, where it is open already.

    The state dict is the one dict in the file that holds tensors, however deep: the file itself, or for example its
    `state_dict` beside an `epoch`. Scalars beside it (a step counter) do not count; two such dicts are refused.
    Tensors that share a storage share the region. Values are read when streamed, except in files of the format before
    PyTorch 1.6, which are loaded. Sparse tensors and torch's own quantised ones are listed as `UnreadableTensor`.

    Raises:
        WeightError: there is no such file, it holds anything but tensors and plain values (the first offending global
            is named), no tensors, or several state dicts.
        CorruptCheckpointError: the file is truncated, damaged, or none of `torch.save`.
    """
    path = Path(path)
    with reading(path):
        file = file or PinnedFile(path)
        start = file.read(0, len(LFS_MAGIC))
    require_weights(path, start)
    if start.startswith(_ZIP_MAGIC):
        return _open_zip(path, file)
    return _loaded(path, mmap=False)


def _corrupt(path: Path, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: damaged PyTorch file: {reason}.", DOWNLOAD_AGAIN)


# --- the pickle -------------------------------------------------------------------------------


def _load(path: Path, *, mmap: bool = False) -> Any:
    """What the file contains, by torch's restricted unpickler."""
    try:
        with warnings.catch_warnings():  # torch warns about protocols and storages, to nobody's use here
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except NotImplementedError:  # what has no shape-only form; see _open_zip
        raise
    except Exception as error:  # a damaged pickle can fail in any way: KeyError, struct.error, MemoryError ...
        raise _load_error(path, error) from error


def _load_error(path: Path, error: Exception) -> WeightError:
    refused = _REFUSED_GLOBAL.search(str(error))
    name = (refused[1] or refused[2]).rstrip(".") if refused else None
    if not _is_zip(path):  # whose pickle has a checksum; a plain one may end in the middle of a name
        name = next((found for found in _pickled_globals(path) if found == name or _is_foreign(found)), None)
    if name is not None:
        return WeightError(
            f"{path}: refused, because unpickling it would call {name}, which is neither a tensor nor plain data.",
            _SAVE_STATE_DICT,
        )
    return _corrupt(path, f"it cannot be unpickled ({_one_line(error)})")


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # an end of several disks: some releases of Python refuse while they look
        return True


def _is_foreign(name: str) -> bool:
    return not name.startswith(("torch.", "collections.OrderedDict"))


def _pickled_globals(path: Path) -> Iterator[str]:
    """What the pickles of a file that is no zip file import, without running them; up to where they are damaged.

    torch stops before a name that is pickled in a younger protocol than its own.
    """
    recent: list[str] = []
    with suppress(Exception), path.open("rb") as file:  # pickletools lets any error through
        for _ in range(_LEGACY_PICKLES):
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in _PICKLE_STRINGS:
                    recent = [*recent[-1:], str(argument)]
                elif opcode.name == "GLOBAL":
                    yield str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL" and len(recent) == 2:
                    yield ".".join(recent)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = next((line for line in lines if line.startswith("Unsupported")), lines[0] if lines else "")
    return f"{type(error).__name__}: {detail[:160].rstrip('.')}" if detail else type(error).__name__


def _state_dict(loaded: Any, path: Path) -> dict[str, torch.Tensor]:
    """The one dict of tensors in what a file contains; see `open_torch_file` for the rule."""
    if isinstance(loaded, torch.Tensor):
        raise WeightError(
            f"{path}: contains one tensor without a name.", "Save a dict: torch.save({'name': tensor}, ...)."
        )
    found = dict(_tensor_dicts(loaded, ""))
    if not found:
        raise WeightError(f"{path}: no named tensors in this file.", "Use a file with a model's state_dict().")
    if len(found) > 1:
        found = {place: held for place, held in found.items() if any(tensor.dim() for tensor in held.values())} or found
    if len(found) > 1:
        places = ", ".join(place or "the file itself" for place in found)
        raise WeightError(
            f"{path}: tensors in {len(found)} dicts ({places}); the weights cannot be identified.",
            "Save the right one in a file of its own.",
        )
    return next(iter(found.values()))


def _tensor_dicts(value: Any, place: str, depth: int = 0) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Every dict with string keys that holds tensors, and where it is: `state_dict`, `model.ema`."""
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH:
        return
    held = {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, torch.Tensor)}
    if held:
        yield place, held
    for key, item in value.items():
        if isinstance(key, str):
            yield from _tensor_dicts(item, f"{place}.{key}" if place else key, depth + 1)


# --- zip files --------------------------------------------------------------------------------


def _open_zip(path: Path, file: PinnedFile) -> dict[str, TensorSource]:
    records = _zip_records(path)
    is_plain = all(record.is_plain for record in records.values())
    try:
        with FakeTensorMode(), sparse_values_unread():  # shapes, dtypes and places; no storage is read
            tensors = _state_dict(_load(path), path) if is_plain else None
    except NotImplementedError:  # torch's own quantised tensors
        tensors = None
    if tensors is None:  # no regions to read; an entry that another tool compressed cannot be mapped either
        return _loaded(path, mmap=is_plain)
    sources: dict[str, TensorSource] = {}
    mapped: dict[str, torch.Tensor] | None = None
    for name, tensor in tensors.items():
        source = _region(name, tensor, file, records)
        if source is None:  # a view that is not one run of bytes
            mapped = mapped or _state_dict(_load(path, mmap=True), path)
            source = _in_memory(name, mapped[name], path)
        sources[name] = source
    return sources


def _zip_records(path: Path) -> dict[int, _Record]:
    """Offset of the first byte of each entry -> the entry."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            records = {}
            for entry in archive.infolist():
                file.seek(entry.header_offset)
                name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
                if start + entry.compress_size > file_bytes:
                    raise _corrupt(path, f"entry {entry.filename} ends after the end of the file")
                if entry.file_size > _DEFLATE_RATIO * entry.compress_size:  # torch sets that much memory aside
                    raise _corrupt(path, f"entry {entry.filename} claims {entry.file_size:,} bytes")
                records[start] = _Record(entry.file_size, entry.compress_type == zipfile.ZIP_STORED)
                _require_notes(archive, entry, path)
            return records
    except WeightError:
        raise
    except Exception as error:  # zipfile lets struct.error, ValueError and others through
        raise _corrupt(path, f"not a complete zip file ({_one_line(error)})") from error


def _require_notes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> None:
    """Refuse what torch would not survive, or take for something else, in the notes that it keeps beside a pickle."""
    note = entry.filename.rpartition("/")[2].lower()  # torch looks for names in either case
    if note == "byteorder" and archive.read(entry) != b"little":
        raise WeightError(f"{path}: not in little-endian byte order.", "Save it on a little-endian machine.")
    if note == ".storage_alignment":  # by which torch divides: 0 ends the process
        text = archive.read(entry)
        if not (text.isdigit() and 0 < int(text) <= _LARGEST_ALIGNMENT):
            raise _corrupt(path, f"storages are aligned to {text[:20]!r} bytes")


def _region(name: str, tensor: torch.Tensor, file: PinnedFile, records: Mapping[int, _Record]) -> TensorSource | None:
    """The run of bytes that a tensor is; None when its values lie scattered."""
    path = file.path
    if _has_no_plain_bytes(tensor):
        return _unreadable(name, tensor, path)
    storage = tensor.untyped_storage()
    offset, record = checkpoint_offset(storage), None
    if offset is not None:
        record = records.get(offset)
    if offset is None or record is None or record.nbytes != storage.nbytes():
        raise _corrupt(path, f"tensor {name} has a storage that is not in the file")
    itemsize, shape = tensor.dtype.itemsize, tuple(tensor.shape)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(shape, tensor.stride(), strict=True))
    if tensor.numel() and (last + 1) * itemsize > record.nbytes:
        raise _corrupt(path, f"tensor {name} of shape {list(shape)} exceeds its storage")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    start = offset + int(tensor.storage_offset()) * itemsize if tensor.numel() else offset
    return FileTensor(name, path, start, shape, tensor.dtype, file=file)


def _loaded(path: Path, *, mmap: bool) -> dict[str, TensorSource]:
    try:
        tensors = _state_dict(_load(path, mmap=mmap), path)
    except NotImplementedError as error:
        raise _corrupt(path, f"it cannot be unpickled ({_one_line(error)})") from error
    return {name: _in_memory(name, tensor, path) for name, tensor in tensors.items()}


def _in_memory(name: str, tensor: torch.Tensor, path: Path) -> TensorSource:
    if _has_no_plain_bytes(tensor):
        return _unreadable(name, tensor, path)
    return InMemoryTensor(name, tensor.detach())


def _has_no_plain_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_quantized


def _unreadable(name: str, tensor: torch.Tensor, path: Path) -> UnreadableTensor:
    stored_as = str(tensor.dtype if tensor.is_quantized else tensor.layout).removeprefix("torch.")
    return UnreadableTensor(name, path, 0, tuple(tensor.shape), tensor.dtype, stored_as, 0)

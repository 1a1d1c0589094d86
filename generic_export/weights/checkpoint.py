"""A checkpoint, opened without reading a weight: one file, or a folder with one file or with shards and an index.

In: a path to safetensors or `torch.save` files. Out: `Checkpoint`, a mapping from tensor name to `TensorSource`.
What the index says and what the shards hold must agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from generic_export.errors import CorruptCheckpointError, WeightError, described
from generic_export.weights.pinned_file import PinnedFile
from generic_export.weights.safetensors_index import open_safetensors, reading
from generic_export.weights.source import DOWNLOAD_AGAIN, TensorSource
from generic_export.weights.torch_file import open_torch_file

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

# What a trainer leaves beside the weights; never taken for them.
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")

_CONVERT = (
    "Safetensors and torch.save files are read. Convert it with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
)
_LONGEST_NAME = 255  # bytes, on every common file system
_OTHER_SUFFIXES = (".h5", ".msgpack", ".gguf", ".npz", ".onnx")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Args:
        tensors: name -> where the tensor lies.
        files: the files that hold them, in the order they were opened.
        total_bytes: bytes of all tensors as stored (headers not counted).
        notes: what a user should know of how the tensors are read, one sentence each.
        held: these files and their index, as they were opened: the tensors are read from them.
    """

    tensors: Mapping[str, TensorSource]
    files: tuple[Path, ...]
    total_bytes: int
    notes: tuple[str, ...] = ()
    held: tuple[PinnedFile, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class _Format:
    """One kind of checkpoint file, and how it is called.

    Args:
        label: what messages call it.
        suffixes: of its files.
        single: the name of a checkpoint that is one file.
        index: the name of the file that lists the shards of a checkpoint.
        open_file: reads where the tensors of one file lie.
    """

    label: str
    suffixes: tuple[str, ...]
    single: str
    index: str
    open_file: Callable[[Path, PinnedFile], Mapping[str, TensorSource]]

    @property
    def index_suffix(self) -> str:
        """How the name of any index of this format ends, such as `.safetensors.index.json`."""
        return self.suffixes[0] + ".index.json"

    def files(self, folder: Path) -> list[Path]:
        """The files of this format in a folder, by name; a trainer's own state is left out."""
        found = (file for file in sorted(folder.iterdir()) if file.suffix in self.suffixes)
        return [file for file in found if not file.name.startswith(_TRAINING_STATE)]


# In the order of preference: a folder with both kinds holds the same weights twice.
_FORMATS = (
    _Format("safetensors", (".safetensors",), "model.safetensors", "model.safetensors.index.json", open_safetensors),
    _Format("PyTorch", TORCH_SUFFIXES, "pytorch_model.bin", "pytorch_model.bin.index.json", open_torch_file),
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder or a single file; no weight of a safetensors or zip file is read.

    Args:
        path: a `.safetensors`, `.bin`, `.pt`, `.pth` or `.ckpt` file, an index (`*.safetensors.index.json`,
            `*.bin.index.json`), or a folder. In a folder these are looked for in turn: `model.safetensors`, a
            safetensors index and its shards, one safetensors file of another name; then the same for PyTorch files
            (`pytorch_model.bin`).

    Raises:
        WeightError: nothing there, only other formats, or a pickle that is not safe to open.
        CorruptCheckpointError: a file is truncated, missing, or contradicts the index.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    for kind in _FORMATS:
        if path.name.endswith(kind.index_suffix):
            return _open_sharded(path, kind)
        if path.suffix in kind.suffixes:
            return _open_single(path, kind)
    if path.suffix in _OTHER_SUFFIXES and path.exists():
        raise WeightError(f"{path}: neither a safetensors nor a PyTorch file.", _CONVERT)
    return _open_single(path, _FORMATS[0])


def _open_single(path: Path, kind: _Format) -> Checkpoint:
    file = _held(path)
    return _checkpoint(kind.open_file(path, file), (path,), (file,))


def _held(path: Path) -> PinnedFile:
    with reading(path):
        return PinnedFile(path)


def _checkpoint(
    tensors: Mapping[str, TensorSource], files: tuple[Path, ...], held: tuple[PinnedFile, ...]
) -> Checkpoint:
    return Checkpoint(tensors, files, sum(tensor.nbytes for tensor in tensors.values()), held=held)


# --- folders ----------------------------------------------------------------------------------


def _open_folder(folder: Path) -> Checkpoint:
    for kind in _FORMATS:
        if (folder / kind.single).exists():
            return _open_single(folder / kind.single, kind)
        index = _find_index(folder, kind)
        if index is not None:
            return _open_sharded(index, kind)
        found = kind.files(folder)
        if len(found) == 1:
            return _open_single(found[0], kind)
        if found:
            names = ", ".join(file.name for file in found[:4]) + (", ..." if len(found) > 4 else "")
            raise WeightError(
                f"{folder}: {len(found)} {kind.label} files ({names}) and no {kind.index} to order them.",
                "Download the index too, or use the path of one file.",
            )
    others = sorted(file.name for file in folder.iterdir() if file.suffix in _OTHER_SUFFIXES)
    if others:
        raise WeightError(f"{folder}: no safetensors or PyTorch file, only {', '.join(others[:4])}.", _CONVERT)
    raise WeightError(f"{folder}: no safetensors file in this folder.", "Check the path of the checkpoint.")


def _find_index(folder: Path, kind: _Format) -> Path | None:
    if (folder / kind.index).exists():
        return folder / kind.index
    found = sorted(folder.glob(f"*{kind.index_suffix}"))
    if len(found) > 1:
        raise WeightError(
            f"{folder}: several index files ({', '.join(file.name for file in found)}).",
            "Use the path of one of them.",
        )
    return found[0] if found else None


def _open_sharded(index: Path, kind: _Format) -> Checkpoint:
    """Open every shard an index names; what the index says and what the shards hold must agree."""
    try:
        held = [PinnedFile(index)]
    except OSError as error:
        raise WeightError(f"{index}: cannot be read: {error.strerror}.") from error
    weight_map = _read_weight_map(index, held[0].read())
    shards: dict[str, Mapping[str, TensorSource]] = {}
    for shard in sorted(set(weight_map.values())):
        if not (index.parent / shard).exists():
            raise CorruptCheckpointError(
                f"{index.parent / shard}: this shard is missing; {index.name} expects "
                f"{sum(where == shard for where in weight_map.values())} tensors in it.",
                "Download the missing file into the same folder.",
            )
        held.append(_held(index.parent / shard))
        shards[shard] = kind.open_file(index.parent / shard, held[-1])
    holders: dict[str, list[str]] = {}
    for shard, listed in shards.items():
        for name in listed:
            holders.setdefault(name, []).append(shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            where = f"it is in {holders[name][0]}" if name in holders else "no shard contains it"
            raise CorruptCheckpointError(
                f"tensor {name}: {index} places it in {shard}, but {where}.",
                "The index and the shards come from different downloads: download the checkpoint again.",
            )
    tensors = {name: shards[shard][name] for name, shard in weight_map.items()}
    for name, candidates in holders.items():  # tensors the index does not list count too, as in transformers
        if name not in weight_map and len(candidates) > 1:
            raise CorruptCheckpointError(
                f"tensor {name}: not listed in {index} and contained in several shards ({', '.join(candidates)}).",
                "Download the checkpoint again.",
            )
        tensors.setdefault(name, shards[candidates[0]][name])
    return _checkpoint(tensors, tuple(index.parent / shard for shard in shards), tuple(held))


def _read_weight_map(index: Path, text: bytes) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> shard path relative to the index, checked."""
    try:
        weight_map: Any = json.loads(text)["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{index}: not a checkpoint index ({described(error)[:200]}).", DOWNLOAD_AGAIN
        ) from error
    if not valid:
        raise CorruptCheckpointError(f"{index}: its weight_map is not a table of file names.", DOWNLOAD_AGAIN)
    for shard in set(weight_map.values()):
        relative = PurePosixPath(shard)
        if any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in relative.parts):
            raise CorruptCheckpointError(f"{index}: a shard name is too long for a file: {shard}.", DOWNLOAD_AGAIN)
        if not relative.parts or not _is_file_name(shard) or relative.is_absolute() or ".." in relative.parts:
            raise CorruptCheckpointError(f"{index}: shard {shard!r} lies outside the checkpoint folder.")
    return dict(weight_map)


def _is_file_name(name: str) -> bool:
    """Whether the system could hold a file of this name at all (no NUL, no lone surrogate)."""
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False

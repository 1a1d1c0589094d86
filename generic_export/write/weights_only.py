"""Checkpoint files to `.dat` files or torch tensors, one tensor at a time.

In: a checkpoint path (safetensors or `torch.save`), or tensors by name. Out: a folder of `.dat` files, whole or not at
all, or an iterator of named tensors.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from generic_export.errors import ArchiveError, DiskFullError, OptionError, OutputExistsError, WeightError, first_line
from generic_export.files import is_disk_full
from generic_export.nnef.dat import dat_size, header_bytes
from generic_export.weights.checkpoint import open_checkpoint
from generic_export.weights.offload import OffloadStore
from generic_export.weights.safetensors_index import UnreadableTensor
from generic_export.weights.source import FileTensor, InMemoryTensor, TensorSource
from generic_export.weights.values import read_tensor, values_of
from generic_export.write.output_path import check_case, check_free_space

StorePath = str | os.PathLike[str]
NameFilter = Callable[[str], bool]
TensorsCheck = Callable[[dict[str, torch.Tensor]], bool | None]

_KEPT_BYTES = 1 << 26  # of tensors that were returned and are used
_BFLOAT16_FORMS = (torch.float32, torch.float16, None)


def iter_torch_tensors_from_disk(
    store_filepath: StorePath,
    filter_key: NameFilter | None = None,
    map_location: str | torch.device = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors of a checkpoint one at a time. At most one is in memory, unless the caller keeps them.

    Args:
        store_filepath: checkpoint file or folder, as in `open_checkpoint`. It is opened by this call and read while iterating.
        filter_key: returns whether to read the tensor of a given name; None reads all.
        map_location: device of the returned tensors.

    Returns:
        An iterator of (name, tensor) in the checkpoint's order. Each tensor owns its memory and has the stored dtype,
        including bf16, complex and 8-bit floats.

    Raises:
        WeightError: the path does not exist, or is an unsafe pickle; or, while iterating, a tensor has no torch dtype or is
            sparse.
        CorruptCheckpointError: a file is truncated, missing or inconsistent with the index.
        OptionError: `map_location` is not a device of this machine.
    """
    device = _device(map_location)
    tensors = _selected(open_checkpoint(Path(store_filepath)).tensors, filter_key)
    return ((name, read_tensor(_as_stored(source)).to(device)) for name, source in tensors.items())


def export_tensors_from_disk_to_nnef(
    store_filepath: StorePath,
    output_dir: StorePath,
    filter_key: NameFilter | None = None,
    fn_check_found_tensors: TensorsCheck | None = None,
    map_location: str | torch.device = "cpu",
    *,
    bfloat16_as: torch.dtype | None = None,
    overwrite: bool = True,
) -> dict[str, torch.Tensor]:
    """Write tensors of a checkpoint as `.dat` files. Tensors are streamed, so their size is not limited by memory.

    Args:
        store_filepath: checkpoint file or folder, as in `open_checkpoint`.
        output_dir: folder for the files. It is created if its parent exists.
        filter_key: returns whether to write the tensor of a given name; None writes all.
        fn_check_found_tensors: called with the result before anything is written. Return False or raise to stop the export.
        map_location: device that converts bf16; everything else stays on the CPU.
        bfloat16_as: dtype to convert bf16 to, which tract does not have: `torch.float32` (exact), `torch.float16` (refused if a
            value does not fit), or None to refuse bf16.
        overwrite: replace existing `.dat` files.

    Returns:
        The tensors by name, in the checkpoint's order and dtype. Values are read from disk when they are used. The file of each
        tensor is `output_dir/NAME.dat`.

    Raises:
        WeightError: as `iter_torch_tensors_from_disk`; or `fn_check_found_tensors` returned False; or a bf16 value does not fit
            f16.
        TensorFormatError: a tensor cannot be stored as `.dat` because of its dtype, rank, or size of 4 GiB or more.
        OutputExistsError: a file exists and `overwrite` is False. Nothing was written.
        ArchiveError: a name is not a path inside the folder, or writing failed. No partial file remains.
    """
    device = _device(map_location)
    tensors = _selected(open_checkpoint(Path(store_filepath)).tensors, filter_key)
    store = OffloadStore(_KEPT_BYTES)
    found: dict[str, torch.Tensor] = {name: store.tensor(source) for name, source in tensors.items()}
    if fn_check_found_tensors is not None and fn_check_found_tensors(found) is False:
        raise WeightError(
            f"{store_filepath}: the check of the tensors found there refused them ({len(tensors)} found).",
            "See fn_check_found_tensors.",
        )
    _write_all(tensors, Path(output_dir), bfloat16_as, device, overwrite)
    return found


def export_tensors_to_nnef(
    name_to_torch_tensors: Mapping[str, torch.Tensor],
    output_dir: StorePath,
    *,
    bfloat16_as: torch.dtype | None = None,
    overwrite: bool = True,
) -> dict[str, torch.Tensor]:
    """Write tensors in memory as `.dat` files.

    Args:
        name_to_torch_tensors: tensors with any strides and device, such as a `state_dict()`.
        output_dir: see `export_tensors_from_disk_to_nnef`.
        bfloat16_as: see `export_tensors_from_disk_to_nnef`.
        overwrite: see `export_tensors_from_disk_to_nnef`.

    Returns:
        The same tensors by name. The file of each tensor is `output_dir/NAME.dat`.

    Raises:
        WeightError: a value is not a tensor, or has no values (meta, sparse), or a bf16 value does not fit f16.
        TensorFormatError: as `export_tensors_from_disk_to_nnef`.
        OutputExistsError: as `export_tensors_from_disk_to_nnef`.
        ArchiveError: as `export_tensors_from_disk_to_nnef`.
    """
    for name, tensor in name_to_torch_tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise WeightError(
                f"tensor {name}: is a {type(tensor).__name__}.", "Give a torch.Tensor, see torch.as_tensor."
            )
    tensors = {name: InMemoryTensor(name, tensor) for name, tensor in name_to_torch_tensors.items()}
    _write_all(tensors, Path(output_dir), bfloat16_as, torch.device("cpu"), overwrite)
    return dict(name_to_torch_tensors)


def _selected(tensors: Mapping[str, TensorSource], filter_key: NameFilter | None) -> dict[str, TensorSource]:
    return {name: source for name, source in tensors.items() if filter_key is None or filter_key(name)}


def _device(map_location: str | torch.device) -> torch.device:
    try:
        device = torch.device(map_location)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        raise OptionError(f"map_location {map_location!r} is no device of this machine: {first_line(error)}") from error
    if device.type == "meta":
        raise OptionError("map_location 'meta': tensors on it have no values.", "Give a real device, such as 'cpu'.")
    return device


# --- reading ----------------------------------------------------------------------------------


def _as_stored(source: TensorSource) -> TensorSource:
    """A region that torch has a dtype for, although nothing here streams it (8-bit floats, complex), as a plain one."""
    if isinstance(source, UnreadableTensor) and source.dtype.itemsize * _count(source) == source.stored_bytes:
        is_stand_in = source.dtype is torch.uint8  # of 4-bit and unknown formats
        if not is_stand_in and source.stored_bytes:
            return FileTensor(source.name, source.path, source.offset, source.shape, source.dtype, file=source.file)
    return source


def _count(source: TensorSource) -> int:
    return torch.Size(source.shape).numel()


# --- writing ----------------------------------------------------------------------------------


def _write_all(
    tensors: Mapping[str, TensorSource],
    output_dir: Path,
    bfloat16_as: torch.dtype | None,
    device: torch.device,
    overwrite: bool,
) -> None:
    """Write every tensor into a folder beside the target, then move the files; whatever fails, nothing stays."""
    dtypes = {name: _dat_dtype(source, bfloat16_as) for name, source in tensors.items()}
    sizes = {name: dat_size(source.shape, dtypes[name], name=f"tensor {name}") for name, source in tensors.items()}
    for name, source in tensors.items():
        if isinstance(source, UnreadableTensor):
            next(source.chunks())  # always refuses, with the reason
        _check_name(name)
    targets = {name: output_dir / f"{name}.dat" for name in tensors}
    staging: Path | None = None
    try:
        _check_targets(output_dir, targets.values(), overwrite)
        check_free_space(output_dir, sum(sizes.values()))
        staging = _staging_folder(output_dir)
        folded: dict[str, str] = {}
        for name, source in tensors.items():
            check_case(folded, f"{name}.dat", staging)
            file = staging / f"{name}.dat"
            file.parent.mkdir(parents=True, exist_ok=True)
            _write_dat(file, source, dtypes[name], device)
        _move_all(staging, output_dir, [f"{name}.dat" for name in tensors])
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"{output_dir}: the disk is full ({sum(sizes.values())} bytes are needed).",
                "Nothing was left behind; free some space or choose another folder.",
            ) from error
        raise ArchiveError(
            f"{output_dir}: cannot be written: {error.strerror or error}.", "Nothing was left behind."
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _staging_folder(output_dir: Path) -> Path:
    """A new folder on the same disk as the target: inside it when it is there, which may be a mount point."""
    parent = output_dir if output_dir.is_dir() else output_dir.absolute().parent
    staging = parent / f".{output_dir.name}.partial-{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def _dat_dtype(source: TensorSource, bfloat16_as: torch.dtype | None) -> torch.dtype:
    if bfloat16_as not in _BFLOAT16_FORMS:
        raise OptionError(
            f"bfloat16_as={bfloat16_as}: not a form of bf16.", "Use torch.float32, torch.float16 or None."
        )
    return bfloat16_as if source.dtype is torch.bfloat16 and bfloat16_as is not None else source.dtype


def _check_name(name: str) -> None:
    """Refuse what is no relative path of visible parts; tract skips names that start with a dot."""
    parts = name.split("/")
    try:
        is_unicode = "\0" not in name and bool(name.encode())
    except UnicodeEncodeError:
        is_unicode = False
    if not is_unicode or any(not part or part.startswith(".") for part in parts):
        raise ArchiveError(f"tensor {name!r}: not a name for a .dat file inside a folder.", "Rename the tensor.")


def _check_targets(output_dir: Path, targets: Iterable[Path], overwrite: bool) -> None:
    if output_dir.name in ("", ".."):
        raise OptionError(f"{output_dir}: not a name for a folder.", "Give the path of a new or existing folder.")
    if output_dir.exists() and not output_dir.is_dir():
        raise OutputExistsError(f"{output_dir}: a file, not a folder.", "Choose another folder.")
    if not output_dir.absolute().parent.is_dir():
        raise ArchiveError(f"{output_dir}: the folder {output_dir.parent} does not exist.", "Create it first.")
    there = [path for path in targets if path.exists()]
    if there and (not overwrite or any(path.is_dir() for path in there)):
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise OutputExistsError(
            f"{there[0]}{more}: there already; nothing was written.", "Choose another folder, or pass overwrite=True."
        )


def _write_dat(path: Path, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
    with path.open("wb") as file:
        file.write(header_bytes(source.shape, dtype, name=f"tensor {source.name}"))
        for chunk in source.chunks():
            file.write(chunk if dtype is source.dtype else _convert_bfloat16(chunk, source.name, dtype, device))
        file.flush()
        os.fsync(file.fileno())


def _convert_bfloat16(chunk: memoryview, name: str, dtype: torch.dtype, device: torch.device) -> memoryview:
    values = values_of(chunk, torch.bfloat16).to(device)
    converted = values.to(dtype)
    if dtype is torch.float16:
        beyond = values[converted.isinf() & ~values.isinf()]
        if beyond.numel():
            raise WeightError(
                f"tensor {name}: values up to {beyond.abs().max().item():.3g} do not fit float16.",
                "Use bfloat16_as=torch.float32.",
            )
    return converted.cpu().view(torch.uint8).numpy().data


def _move_all(staging: Path, output_dir: Path, files: list[str]) -> None:
    """Give the finished files their names: all at once in a new folder, one by one in an existing one."""
    if not output_dir.exists():
        staging.rename(output_dir)
        return
    moved: list[Path] = []
    try:
        for name in files:
            target = output_dir / name
            is_new = not target.exists()
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(target)
            if is_new:
                moved.append(target)
    except BaseException:
        for path in moved:
            with suppress(OSError):
                path.unlink()
        raise

"""The PyTorch model of a reference run: where its f32 weights stay (memory, GPU, disk), and how it gets them.

In: a model on the meta device and a `Placement`. Out: a `Residency`, and the loaded model inside a `with` block. Names,
conversions, tied weights and buffers are transformers' own; weights on disk are read by accelerate, layer after layer.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from generic_export.errors import CorruptCheckpointError, DiskFullError, NotEnoughMemoryError, OptionError
from t2n_llm.compat import around_initialisers, is_loaded, unsplit_classes
from t2n_llm.source.empty_model import CAUSAL_LM, ModelKind

if TYPE_CHECKING:
    from t2n_llm.source.adapter import Adapter

DEVICE_MAPS = ("auto", "cpu", "disk", "cuda")

_F32_BYTES = 4
_HEADROOM = 1.1  # activations, caches and logits around weights that are all in memory
_WORKING_COPIES = 2.5  # of the largest layer: as stored, as f32, and while it is converted
_WORKING_BYTES = 256 << 20  # activations, caches and logits of a run whose weights come from disk
_USABLE = 0.8  # share of the free memory that weights may take when not all of them fit
_ALWAYS_RESIDENT_BYTES = 1 << 20  # norms and their like: not worth a read
_DISK = "disk"
_CPU = "cpu"

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


@dataclass(frozen=True)
class Placement:
    """Where the weights of the reference run may stay.

    Attributes:
        device_map: `auto` (memory when they fit, else memory and disk), `cpu` (all in memory), `disk` (all on disk),
            or `cuda` (GPUs first, then memory, then disk).
        max_memory: most bytes of weights by device: `cpu`, or the number of a GPU.
    """

    device_map: str = "auto"
    max_memory: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device_map not in DEVICE_MAPS:
            raise OptionError(f"device map {self.device_map!r} is unknown.", f"Use one of {', '.join(DEVICE_MAPS)}.")

    @staticmethod
    def parse(device_map: str = "auto", max_memory: str | None = None) -> Placement:
        """Read the two options of the command line.

        Args:
            device_map: see the class.
            max_memory: a size (`8GB`, `500MiB`; of the main memory), or sizes by device (`cpu=8GB,0=20GB`).

        Raises:
            OptionError: one of them has no meaning.
        """
        entries = [entry.strip() for entry in (max_memory or "").split(",") if entry.strip()]
        pairs = [entry.split("=", 1) if "=" in entry else (_CPU, entry) for entry in entries]
        sizes = {device.strip(): _bytes(size.strip()) for device, size in pairs}
        wrong = next((device for device in sizes if device != _CPU and not device.isdigit()), None)
        if wrong is not None:
            raise OptionError(f"--max-memory names device {wrong!r}.", "Devices are cpu and the numbers of GPUs.")
        return Placement(device_map, sizes)


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise OptionError(f"{text!r} is no size.", "Give one such as 8GB, 500MiB or 2000000000.")
    return int(float(match[1]) * _SIZES[(match[2] or "").lower()])


@dataclass(frozen=True)
class Residency:
    """Where each part of a model's weights stays during a reference run.

    Attributes:
        devices: `cpu`, `disk` or a GPU's number, by module path; together the paths own every parameter.
        disk_bytes: f32 bytes that are read from disk in every pass.
        largest_bytes: f32 bytes of the largest layer.
    """

    devices: Mapping[str, str | int] = field(default_factory=dict)
    disk_bytes: int = 0
    largest_bytes: int = 0

    @property
    def offloaded(self) -> bool:
        """Whether weights are read from disk during the run."""
        return self.disk_bytes > 0

    def summary(self, folder: Path, passes: int) -> str:
        """Say what an offloaded run will read, and how long that takes at least on this disk.

        Args:
            folder: where the checkpoint is.
            passes: how often the model runs; to load it is one pass more.
        """
        speed = _disk_speed(folder)
        seconds = self.disk_bytes * (passes + 1) / speed if speed else 0
        time_left = f", {seconds / 60:.0f} min or more" if seconds >= 60 else ""
        size = f"{self.disk_bytes / 1e9:.1f} GB" if self.disk_bytes >= 1e8 else f"{self.disk_bytes / 1e6:.1f} MB"
        return f"{size} of weights stay on disk and are read about {passes + 1} times{time_left}"


# --- choosing ---------------------------------------------------------------------------------


def plan_residency(model: nn.Module, placement: Placement | None = None) -> Residency:
    """Decide where the f32 weights of a model stay, before hours of work end in a killed process.

    Args:
        model: a transformers causal LM, best on the meta device; only shapes matter.
        placement: what the user asked for.

    Raises:
        NotEnoughMemoryError: not even one layer at a time fits; says how much is needed and how much is free.
        OptionError: a GPU is asked for and there is none.
    """
    placement = placement or Placement()
    blocks = _blocks(model)
    whole = sum(block.size for block in blocks)
    largest = max((_F32_BYTES * _own_numel(module) for module in model.modules()), default=0)
    rooms = _rooms(placement, whole, largest)
    devices = _assign(blocks, rooms)
    on_disk = sum(block.size for block in blocks if devices[block.path] == _DISK)
    return Residency(devices, on_disk, largest)


@dataclass(frozen=True)
class _Block:
    """Modules that go to one device together: f32 bytes of what they own, and the earlier block they share it with."""

    path: str
    size: int
    tied_to: str | None


def _blocks(model: nn.Module) -> list[_Block]:
    whole_classes = unsplit_classes(model)
    owners: dict[int, str] = {}
    blocks = []
    for path, module in _units(model, "", whole_classes):
        size, tied_to = 0, None
        for tensor in (*module.parameters(), *module.buffers()):
            owner = owners.setdefault(id(tensor), path)
            if owner == path:
                size += _F32_BYTES * tensor.numel()
            else:
                tied_to = owner
        blocks.append(_Block(path, size, tied_to))
    return blocks


def _units(module: nn.Module, path: str, whole_classes: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the smallest modules that may be placed on their own: layers, and what stands beside them."""
    children = list(module.named_children())
    owns = next(module.parameters(recurse=False), None) is not None
    if path and (owns or not children or type(module).__name__ in whole_classes):
        yield path, module
        return
    for name, child in children:
        yield from _units(child, f"{path}.{name}" if path else name, whole_classes)


def _own_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _rooms(placement: Placement, whole: int, largest: int) -> dict[str | int, float]:
    """Return the bytes of weights that each device takes, in the order in which they are filled."""
    free = available_memory()
    working = largest * _WORKING_COPIES + _WORKING_BYTES
    cap = placement.max_memory.get(_CPU)
    rooms = _cuda_rooms(placement, working) if placement.device_map == "cuda" else {}
    left = max(0.0, whole - sum(rooms.values()))
    fits = (free is None or left * _HEADROOM <= free) and (cap is None or left <= cap)
    if fits and placement.device_map != _DISK:
        return {**rooms, _CPU: float("inf")}
    if placement.device_map == _CPU:
        raise _too_small(whole * _HEADROOM, free if cap is None else min(cap, free or cap), "--device-map auto")
    if free is not None and working > free:
        raise _too_small(working, free, None)
    room = float("inf") if free is None else max(0.0, free * _USABLE - working)
    if cap is not None:
        room = min(room, cap)
    return {**rooms, _CPU: 0.0 if placement.device_map == _DISK else room}


def _cuda_rooms(placement: Placement, working: float) -> dict[str | int, float]:
    if not torch.cuda.is_available():
        raise OptionError("--device-map cuda: PyTorch finds no GPU here.", "Use --device-map auto.")
    rooms: dict[str | int, float] = {}
    for number in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(number)
        rooms[number] = min(placement.max_memory.get(str(number), free), max(0.0, free * _USABLE - working))
    return rooms


def _too_small(needed: float, free: float | None, alternative: str | None) -> NotEnoughMemoryError:
    hint = f"Use {alternative}, which leaves on disk what does not fit; or" if alternative else "Pass"
    return NotEnoughMemoryError(
        f"the check runs the PyTorch model in f32, which needs {needed / 1e9:.1f} GB of memory; "
        f"{(free or 0) / 1e9:.1f} GB are free.",
        f"{hint} --no-check, and run t2n-llm validate on a larger machine.",
    )


def _assign(blocks: list[_Block], rooms: Mapping[str | int, float]) -> dict[str, str | int]:
    """Fill the devices in order, block after block; what is left stays on disk."""
    left = dict(rooms)
    waiting = list(rooms)
    devices: dict[str, str | int] = {}
    for block in blocks:
        if block.tied_to is not None:  # one tensor cannot be in two places
            devices[block.path] = devices[block.tied_to]
        elif block.size <= _ALWAYS_RESIDENT_BYTES and waiting[:1] in ([], [_CPU]):
            devices[block.path] = _CPU
        else:
            while waiting and left[waiting[0]] < block.size:
                waiting.pop(0)
            devices[block.path] = waiting[0] if waiting else _DISK
            if waiting:
                left[waiting[0]] -= block.size
    if devices and set(devices.values()) == {_DISK}:  # accelerate wants a device to compute on
        smallest = min((block for block in blocks if block.tied_to is None), key=lambda block: block.size)
        devices |= {block.path: _CPU for block in blocks if smallest.path in (block.path, block.tied_to)}
    return devices


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping (Linux: MemAvailable of proc(5)), or None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kilobytes) * 1024 if kilobytes is not None else None


def _disk_speed(folder: Path) -> float | None:
    """Return the f32 bytes a second that come from a checkpoint's disk, measured on its largest file past the cache."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if not files or not hasattr(os, "posix_fadvise"):
        return None
    with suppress(OSError), files[-1].open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        count = len(file.read(64 << 20))
        # Half-width values become f32: about twice the bytes.
        return 2 * count / max(time.perf_counter() - start, 1e-6)
    return None


# --- loading ----------------------------------------------------------------------------------


@contextmanager
def reference_model(
    folder: Path,
    residency: Residency | None = None,
    *,
    adapter: Adapter | None = None,
    trust_remote_code: bool = False,
) -> Iterator[Any]:
    """Yield the model of a checkpoint in f32, its weights where the residency has them.

    Args:
        folder: config and safetensors, quantised or not, or a GGUF file.
        residency: None keeps everything in memory; a quantised model stays there in any case.
        adapter: merged into the weights.
        trust_remote_code: allow code that comes with the model.

    Raises:
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
    """
    from t2n_llm.compress.prequantized import load_dequantized

    dequantized = load_dequantized(folder, trust_remote_code=trust_remote_code)
    if dequantized is not None:
        yield _with_adapter(dequantized, adapter)
        return
    devices = dict(residency.devices) if residency is not None else {}
    places = set(devices.values())
    if places <= {_CPU}:
        yield _with_adapter(_from_pretrained(folder, trust_remote_code), adapter)
        return
    if len(places) == 1:
        (device,) = places
        yield _with_adapter(_from_pretrained(folder, trust_remote_code, device_map={"": device}), adapter)
        return
    _give_back_freed_memory()
    # Tensors that a conversion makes (stacked experts) lie in no file; transformers writes them here.
    with tempfile.TemporaryDirectory(prefix="t2n-llm-offload-") as made:
        with _explained_disk_full(made), _silenced("accelerate.big_modeling"):
            model = _from_pretrained(folder, trust_remote_code, device_map=devices, offload_folder=made)
        if adapter is not None:
            adapter.merge_into_offloaded(model)
        yield model


def load_f32(weights: Path, trust_remote_code: bool = False) -> Any:
    """Return the whole model of a checkpoint in f32, in memory, whether it is quantised or not.

    Args:
        weights: a folder, or a GGUF file.
        trust_remote_code: allow code that comes with the model.

    Raises:
        CorruptCheckpointError: transformers had to invent weights that the checkpoint lacks.
    """
    from t2n_llm.compress.prequantized import load_dequantized

    dequantized = load_dequantized(weights, trust_remote_code=trust_remote_code)
    return _from_pretrained(weights, trust_remote_code) if dequantized is None else dequantized


def _from_pretrained(folder: Path, trust_remote_code: bool, **placement: Any) -> Any:
    model, missing = eager_model(CAUSAL_LM, folder, trust_remote_code, **placement)
    refuse_invented(str(folder), missing)
    return model


def eager_model(
    kind: ModelKind, folder: Path, trust_remote_code: bool, **placement: Any
) -> tuple[Any, tuple[str, ...]]:
    """Return transformers' own model of a checkpoint in f32, and the parameters that it had to invent.

    Args:
        kind: which class of transformers.
        folder: config and plain safetensors.
        trust_remote_code: allow code that comes with the model.
        placement: of its weights, for `from_pretrained`; without any they are in memory.
    """
    import transformers

    with _padding_rows_kept():
        model, report = getattr(transformers, kind.auto_class).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **placement,
        )
    return model.eval(), tuple(sorted(report.get("missing_keys", ())))


@contextmanager
def _padding_rows_kept() -> Iterator[None]:
    """Keep the padding token's row of an embedding as the checkpoint has it, also where a model's initialiser writes to it.

    transformers marks loaded parameters, and its initialisers leave marked tensors alone; a view of one (`weight.data[row]`,
    Youtu) has no mark, so `from_pretrained` sets the row to zero, and with tied embeddings the token's logit.
    """

    def keeping_the_row(module: Any, initialise: Callable[[], None]) -> None:
        loaded = isinstance(module, nn.Embedding) and is_loaded(module.weight)
        row = module.padding_idx if loaded else None
        kept = module.weight[row].detach().clone() if row is not None else None
        initialise()
        if kept is not None:
            with torch.no_grad():
                module.weight[row] = kept

    with around_initialisers(keeping_the_row):
        yield


def refuse_invented(name: str, missing: Iterable[str]) -> None:
    """Refuse a model some of whose weights are not the checkpoint's.

    Args:
        name: of the checkpoint, for the message.
        missing: parameters that it does not have.

    Raises:
        CorruptCheckpointError: there is one.
    """
    invented = sorted(missing)
    if invented:
        raise CorruptCheckpointError(
            f"{name}: transformers finds no weights for {invented[0]} ({len(invented)} missing)."
        )


def require_memory(network: nn.Module, placement: Placement | None) -> None:
    """Refuse a check whose PyTorch model cannot stay in memory.

    Args:
        network: the model, best on the meta device.
        placement: what the user allows.

    Raises:
        NotEnoughMemoryError: it does not fit in f32.
    """
    if plan_residency(network, placement).offloaded:
        raise NotEnoughMemoryError(
            "the check needs the PyTorch model in memory in f32, and it does not fit.",
            "Pass --no-check, and run t2n-llm validate on a larger machine.",
        )


def _with_adapter(model: Any, adapter: Adapter | None) -> Any:
    return model if adapter is None else adapter.merge_into(model)


@contextmanager
def _explained_disk_full(folder: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors tells the system's reason in words only
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DiskFullError(
            f"{folder}: the disk is full; tensors that PyTorch's weights on disk are made into are kept there.",
            "Set TMPDIR to a folder on a larger disk, or pass --no-check.",
        ) from error


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Keep a logger's notices, such as that weights are on disk as asked, out of our output."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _give_back_freed_memory() -> None:
    """Let freed tensors go back to the system at once, on glibc; elsewhere that is how it is.

    glibc raises the size from which it maps memory for each block up to 32 MiB, and keeps what it frees below: a run that
    reads layer after layer would grow to the size of the model (mallopt(3), M_MMAP_THRESHOLD).
    """
    m_mmap_threshold = -3
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)

"""Where the f32 weights of a PyTorch model stay: memory, GPU or disk.

In: a model on the meta device, and what the user allows, a `Placement`. Out: a `Residency`, or the refusal of what cannot fit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import nn

from generic_export.errors import NotEnoughMemoryError, OptionError
from generic_export.sizes import parse_size
from t2n_llm.compat import unsplit_classes

CPU = "cpu"
DEVICE_MAPS = ("auto", "cpu", "disk", "cuda")

_F32_BYTES = 4
_HEADROOM = 1.1  # activations, caches and logits around weights that are all in memory
_WORKING_COPIES = 2.5  # of the largest layer: as stored, as f32, and while it is converted
_WORKING_BYTES = 256 << 20  # activations, caches and logits of a run whose weights come from disk
_USABLE = 0.8  # share of the free memory that weights may take when not all of them fit
_ALWAYS_RESIDENT_BYTES = 1 << 20  # norms and their like: not worth a read
_DISK = "disk"


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
        pairs = [entry.split("=", 1) if "=" in entry else (CPU, entry) for entry in entries]
        sizes = {device.strip(): parse_size(size) for device, size in pairs}
        wrong = next((device for device in sizes if device != CPU and not device.isdigit()), None)
        if wrong is not None:
            raise OptionError(f"--max-memory names device {wrong!r}.", "Devices are cpu and the numbers of GPUs.")
        return Placement(device_map, sizes)


@dataclass(frozen=True)
class Residency:
    """Where each part of a model's weights stays during a reference run.

    Attributes:
        devices: `cpu`, `disk` or a GPU's number, by module path; together the paths own every parameter.
        disk_bytes: f32 bytes that are read from disk in every pass.
    """

    devices: Mapping[str, str | int] = field(default_factory=dict)
    disk_bytes: int = 0

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
    return Residency(devices, on_disk)


def require_memory(
    network: nn.Module,
    placement: Placement | None,
    needed_by: str = "the check needs the PyTorch model",
    hint: str = "Pass --no-check, and run t2n-llm validate on a larger machine.",
) -> None:
    """Refuse what needs a PyTorch model that cannot stay in memory.

    Args:
        network: the model, best on the meta device.
        placement: what the user allows.
        needed_by: what needs it, as the message begins.
        hint: what to do about it.

    Raises:
        NotEnoughMemoryError: it does not fit in f32.
    """
    if plan_residency(network, placement).offloaded:
        raise NotEnoughMemoryError(
            f"{needed_by} in memory in f32, which does not fit.",
            hint,
        )


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
    cap = placement.max_memory.get(CPU)
    rooms = _cuda_rooms(placement, working) if placement.device_map == "cuda" else {}
    left = max(0.0, whole - sum(rooms.values()))
    fits = left * _HEADROOM <= free and (cap is None or left <= cap)
    if fits and placement.device_map != _DISK:
        return {**rooms, CPU: float("inf")}
    if placement.device_map == CPU:
        raise _too_small(whole * _HEADROOM, free if cap is None else min(cap, free), "--device-map auto")
    if working > free:
        raise _too_small(working, free, None)
    room = max(0.0, free * _USABLE - working)
    if cap is not None:
        room = min(room, cap)
    return {**rooms, CPU: 0.0 if placement.device_map == _DISK else room}


def _cuda_rooms(placement: Placement, working: float) -> dict[str | int, float]:
    if not torch.cuda.is_available():
        raise OptionError("--device-map cuda: PyTorch finds no GPU.", "Use --device-map auto.")
    rooms: dict[str | int, float] = {}
    for number in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(number)
        rooms[number] = min(placement.max_memory.get(str(number), free), max(0.0, free * _USABLE - working))
    return rooms


def _too_small(needed: float, free: float, alternative: str | None) -> NotEnoughMemoryError:
    hint = f"Use {alternative}, which leaves weights that do not fit on disk; or" if alternative else "Pass"
    return NotEnoughMemoryError(
        f"the check runs the PyTorch model in f32, which needs {needed / 1e9:.1f} GB of memory, but "
        f"{free / 1e9:.1f} GB are free.",
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
        elif block.size <= _ALWAYS_RESIDENT_BYTES and waiting[:1] in ([], [CPU]):
            devices[block.path] = CPU
        else:
            while waiting and left[waiting[0]] < block.size:
                waiting.pop(0)
            devices[block.path] = waiting[0] if waiting else _DISK
            if waiting:
                left[waiting[0]] -= block.size
    if devices and set(devices.values()) == {_DISK}:  # accelerate wants a device to compute on
        smallest = min((block for block in blocks if block.tied_to is None), key=lambda block: block.size)
        devices |= {block.path: CPU for block in blocks if smallest.path in (block.path, block.tied_to)}
    return devices


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping."""
    return int(psutil.virtual_memory().available)


def _disk_speed(folder: Path) -> float | None:
    """Return the f32 bytes a second that come from a checkpoint's disk, measured on its largest file past the cache."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if not files or sys.platform != "linux":
        return None
    with suppress(OSError), files[-1].open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        count = len(file.read(64 << 20))
        # Half-width values become f32: about twice the bytes.
        return 2 * count / max(time.perf_counter() - start, 1e-6)
    return None

"""What a report of a problem needs to say of a machine: versions, engines, processor, memory, disk, caches, variables.

In: nothing. Out: an `Environment`. Versions are those of the installed packages' metadata; no value of a secret is told.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from generic_export.errors import EngineError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.releases.install import default_cache_dir
from generic_export.inference_target.tract.releases.wheels import wheels_dir
from generic_export.sizes import size_text
from generic_export.tested_versions import TORCH, TRACT, TRANSFORMERS, doubts
from t2n_llm.bench.compared_engines.protocol import processors

PACKAGES = (
    *("t2n-llm", "torch", "transformers", "huggingface-hub", "safetensors", "tokenizers", "accelerate", "numpy"),
    *("tract", "hf-xet", "numba", "onnxruntime-genai"),
)
# What tract, PyTorch and this package compute with, where there is a choice: names of Linux and of macOS.
CPU_FEATURES: Mapping[str, tuple[str, ...]] = {
    "AVX2": ("avx2", "hw.optional.avx2_0"),
    "FMA": ("fma", "hw.optional.fma"),
    "F16C": ("f16c", "hw.optional.f16c"),
    "AVX-512": ("avx512f", "hw.optional.avx512f"),
    "AVX-512 VNNI": ("avx512_vnni",),
    "NEON": ("asimd", "neon", "hw.optional.neon", "hw.optional.AdvSIMD"),
    "fp16": ("asimdhp", "hw.optional.arm.FEAT_FP16"),
    "dot product": ("asimddp", "hw.optional.arm.FEAT_DotProd"),
}
VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_TOKEN", "XDG_CACHE_HOME"),
    *("TRACT_BINARY", "TRACT_CPU_ISA", "TMPDIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "NO_COLOR", "HTTPS_PROXY", "HTTP_PROXY"),
)
_SECRET = frozenset({"HF_TOKEN", "HTTPS_PROXY", "HTTP_PROXY"})  # proxies may name a user and a password


@dataclass(frozen=True)
class CacheFolder:
    """A folder that is filled as need be, and may be deleted.

    Attributes:
        name: what is in it.
        path: where it is.
        bytes: what it takes on the disk; None where there is none.
    """

    name: str
    path: str
    bytes: int | None


@dataclass(frozen=True)
class Environment:
    """This machine, and what is installed on it.

    Attributes:
        python, system: in words.
        packages: name -> version, or None.
        doubts: what is installed and was not tried with this release, a sentence each.
        tract_command: path and version of the `tract` command, or why there is none.
        processor: its name.
        cores: that this process may use.
        features: of the processor, name -> whether it has it; those of another kind of processor are left out.
        memory_bytes, available_bytes: of the machine, and free now.
        disks: purpose -> (path, free bytes).
        caches: folders that are filled as need be.
        variables: those that are set; of secrets only that they are.
    """

    python: str
    system: str
    packages: Mapping[str, str | None]
    doubts: tuple[str, ...]
    tract_command: str
    processor: str
    cores: int
    features: Mapping[str, bool]
    memory_bytes: int
    available_bytes: int
    disks: Mapping[str, tuple[str, int]]
    caches: tuple[CacheFolder, ...]
    variables: Mapping[str, str]

    def asdict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield it as lines of a table."""
        yield "Python", self.python
        yield "system", self.system
        yield from ((name, found or "not installed") for name, found in self.packages.items())
        yield from (("not tried", doubt) for doubt in self.doubts)
        yield "tract command", self.tract_command
        yield "processor", f"{self.processor}, {self.cores} cores for this process"
        yield "features", ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in self.features.items())
        yield "memory", f"{size_text(self.memory_bytes)}, {size_text(self.available_bytes)} available"
        yield from ((f"disk, {what}", f"{size_text(free)} free: {path}") for what, (path, free) in self.disks.items())
        for cache in self.caches:
            yield f"cache, {cache.name}", f"{'none' if cache.bytes is None else size_text(cache.bytes)}: {cache.path}"
        yield from ((f"${name}", value) for name, value in self.variables.items())


def read_environment() -> Environment:
    """Return what this machine is and has; the sizes of caches take a moment."""
    memory = psutil.virtual_memory()
    return Environment(
        python=f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        system=f"{platform.platform()}, {platform.machine()}",
        packages={name: _version(name) for name in PACKAGES},
        doubts=tuple(doubts(TORCH, TRANSFORMERS, TRACT)),
        tract_command=_tract_command(),
        processor=_processor(),
        cores=processors(),
        features=_features(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        disks={"exports": _free(Path.cwd()), "temporary files": _free(Path(tempfile.gettempdir()))},
        caches=tuple(_caches()),
        variables={name: _told(name) for name in VARIABLES if os.environ.get(name)},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _tract_command() -> str:
    try:
        command = TractCli()
    except EngineError as error:
        return error.message
    return f"{command.version}, {command.binary}"


def _processor() -> str:
    named = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return next(iter(named), "") or platform.processor() or platform.machine()


def _features() -> dict[str, bool]:
    """Return which features the processor has, of those that its kind could have."""
    flags = {word for line in _cpuinfo() if line.startswith(("flags", "Features")) for word in line.split()[1:]}
    flags |= _sysctl()
    arm = platform.machine().lower() in ("aarch64", "arm64", "armv7l", "armv8l")
    kinds = [name for name in CPU_FEATURES if (name in ("NEON", "fp16", "dot product")) == arm]
    return {name: bool(flags.intersection(CPU_FEATURES[name])) for name in kinds} if flags else {}


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _sysctl() -> set[str]:
    """Return the features that macOS tells; none on other systems."""
    import subprocess

    if sys.platform != "darwin":
        return set()
    try:
        said = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return {line.partition(":")[0] for line in said.splitlines() if line.rpartition(":")[2].strip() == "1"}


def _free(folder: Path) -> tuple[str, int]:
    return str(folder), shutil.disk_usage(folder if folder.exists() else Path(folder.anchor)).free


def _caches() -> Iterator[CacheFolder]:
    from huggingface_hub import constants

    for name, folder in (
        ("Hugging Face Hub", Path(constants.HF_HUB_CACHE)),
        ("tract commands", default_cache_dir()),
        ("tract wheels", wheels_dir()),
    ):
        yield CacheFolder(name, str(folder), _size(folder) if folder.is_dir() else None)


def _size(folder: Path) -> int:
    """Return what the files below a folder take; a file that several links lead to counts once."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                status = os.lstat(os.path.join(root, file))
            except OSError:  # deleted meanwhile
                continue
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def _told(name: str) -> str:
    return "set" if name in _SECRET else os.environ[name]


__all__ = ["CacheFolder", "Environment", "read_environment"]

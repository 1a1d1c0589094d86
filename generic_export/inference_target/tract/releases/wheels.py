"""tract releases beside the installed one, each fetched once into the user's cache and used from there.

In: a release number. Out: the folder that holds its package, for `TractWheel(packages=...)`; None for the installed release.
`python -m generic_export.inference_target.tract.releases wheels 0.22.4` fetches ahead, for work without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from generic_export.errors import EngineMissingError, T2NError
from generic_export.files import sha256, write_whole
from generic_export.inference_target.tract.releases.dialect import RELEASES
from generic_export.inference_target.tract.releases.install import default_cache_dir
from generic_export.inference_target.version import SemanticVersion

RECORD = "wheel.json"  # beside the package: which file it came from, and the SHA-256 of that file

_PIP_TIMEOUT_SECONDS = 600.0
_REASON_CHARACTERS = 160
_COMMAND = "python -m generic_export.inference_target.tract.releases wheels"

log = logging.getLogger(__name__)


def wheels_dir() -> Path:
    """Return the folder that holds one folder per release and kind of Python."""
    return default_cache_dir().parent / "wheels"


def cached_wheel(version: str | SemanticVersion) -> Path:
    """Return where the package of a release is, or would be, for this Python: its compiled part fits no other."""
    return wheels_dir() / f"{SemanticVersion.parse(version)}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def wheel_packages(version: str | SemanticVersion, *, fetch: bool = True) -> Path | None:
    """Return the folder whose `tract` is a release, fetched if it is not there yet; None when it is the installed one.

    Args:
        version: the release.
        fetch: let pip fetch it; otherwise one that is not there is missing.

    Raises:
        EngineMissingError: it is not on this machine and pip cannot fetch it; the hint is the command for later.
    """
    release = SemanticVersion.parse(version)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("tract") == str(release):
            return None
    folder = cached_wheel(release)
    if _is_whole(folder):
        return folder
    if not fetch:
        raise _missing(release, "nobody asked for it")
    try:
        with _locked(folder):
            return folder if _is_whole(folder) else _fetched(release, folder)
    except OSError as error:
        raise _missing(release, f"{error.filename or folder}: {error.strerror or error}") from error


def _is_whole(folder: Path) -> bool:
    return (folder / RECORD).is_file()


def _missing(release: SemanticVersion, reason: str, hint: str = "") -> EngineMissingError:
    later = f"Where there is a network, run: {_COMMAND} {release}. Or export with check_io=False."
    return EngineMissingError(
        f"the wheel of tract {release} is not on this machine, and was not fetched: {reason}.", hint or later
    )


def _locked(folder: Path) -> FileLock:
    """Let one process at a time fetch a release; the others wait, then find it. The system frees the lock of a dead one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.parent / f".{folder.name}.lock")


def _fetched(release: SemanticVersion, folder: Path) -> Path:
    """Fetch under the lock: everything in a folder of its own, renamed once it is whole."""
    log.info("fetching the wheel of tract %s into %s", release, folder)
    prefix = f".{folder.name}.fetch-"
    for left in folder.parent.glob(f"{prefix}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as work:
        pip, wheels, packages = _pip(Path(work)), Path(work) / "wheels", Path(work) / "packages"
        # numpy, its only dependency, is there: with this project.
        fetched = ["download", "--only-binary", ":all:", "--no-deps", "--dest", str(wheels), f"tract=={release}"]
        _run([*pip, *fetched], release)
        (wheel,) = wheels.iterdir()
        _run([*pip, "install", "--no-index", "--no-deps", "--target", str(packages), str(wheel)], release)
        record = {"release": str(release), "file": wheel.name, "sha256": sha256(wheel)}
        write_whole(packages / RECORD, json.dumps(record, indent=1) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        packages.replace(folder)
    return folder


def _pip(work: Path) -> list[str]:
    """Return the command of pip: this Python's, or where that has none (uv makes such environments) one for the moment."""
    python = sys.executable
    if find_spec("pip") is None:
        venv.create(work / "pip", with_pip=True)
        python = str(work / "pip" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    return [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


def _run(command: Sequence[str], release: SemanticVersion) -> None:
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _missing(release, f"pip did not end within {_PIP_TIMEOUT_SECONDS:g} s") from None
    if run.returncode:
        raise _refused(release, run.stderr)


def _refused(release: SemanticVersion, said: str) -> EngineMissingError:
    """Return what pip's refusal means: nothing could be reached, there is no such wheel, or something else."""
    lines = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.strip()]
    if any("connection" in line.lower() or "from versions: none" in line for line in lines):
        return _missing(release, "pip reaches no package index")
    if any("Could not find a version" in line for line in lines):
        python = f"{sys.implementation.cache_tag} on {sysconfig.get_platform()}"
        hint = "Choose another release, or give its command as specific_tract_binary_path."
        return _missing(release, f"there is none for {python}", hint)
    reason = lines[-1] if lines else "nothing"
    return _missing(release, f"pip says {reason[:_REASON_CHARACTERS].rstrip('.')}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m generic_export.inference_target.tract.releases wheels`: one line per release."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description="Fetch the wheels of tract releases ahead of their use, each into a folder of its own.",
        epilog=f"They lie in {wheels_dir()}. Running it twice is instant.",
    )
    parser.add_argument("versions", nargs="*", default=list(RELEASES), help="releases (default: %(default)s)")
    try:
        for version in parser.parse_args(arguments).versions:
            print(f"{version}: {wheel_packages(version) or 'installed'}")
    except T2NError as error:
        print(f"tract wheels: {error}", file=sys.stderr)
        return 1
    return 0


__all__ = ["RECORD", "cached_wheel", "main", "wheel_packages", "wheels_dir"]

"""tract releases beside the installed one, each in a virtual environment of its own.

In: a release number. Out: the interpreter whose `tract` is that release, for `TractWheel(python=...)`.
`scripts/install_tract_wheels` makes them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from generic_export.errors import EngineMissingError, T2NError
from generic_export.inference_target.tract.releases.dialect import RELEASES
from generic_export.inference_target.tract.releases.install import default_cache_dir

_PIP_TIMEOUT_SECONDS = 600.0


def wheels_dir() -> Path:
    """Return the folder that holds one virtual environment per release."""
    return default_cache_dir().parent / "wheels"


def wheel_python(version: str) -> Path | None:
    """Return the interpreter that has a release; None when it is this one.

    Raises:
        EngineMissingError: the release is not installed.
    """
    try:
        if importlib.metadata.version("tract") == version:
            return None
    except importlib.metadata.PackageNotFoundError:
        pass
    python = wheels_dir() / version / "bin" / "python"
    if not python.exists():
        raise EngineMissingError(f"the wheel of tract {version} is not installed.", "Run scripts/install_tract_wheels.")
    return python


def install_wheel(version: str) -> Path | None:
    """Make the virtual environment of a release if it is not there yet, and return its interpreter.

    Raises:
        EngineMissingError: pip cannot install it.
    """
    try:
        return wheel_python(version)
    except EngineMissingError:
        pass
    folder = wheels_dir() / version
    python = folder / "bin" / "python"
    venv.create(folder, with_pip=True, clear=True)
    try:
        run = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", f"tract=={version}", "numpy"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_SECONDS,
        )
        reason = run.stderr.strip().splitlines()[-1:] if run.returncode else []
    except subprocess.TimeoutExpired:
        reason = [f"no end after {_PIP_TIMEOUT_SECONDS:g} s"]
    if reason:
        python.unlink()  # an environment without tract must not be taken for one that has it
        raise EngineMissingError(f"pip cannot install tract {version}: {reason[0]}.")
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of scripts/install_tract_wheels: print one line per release."""
    parser = argparse.ArgumentParser(
        prog="install_tract_wheels",
        description="Install tract releases, each in a virtual environment of its own, for scripts/compatibility.py.",
        epilog=f"They lie in {wheels_dir()}. Running it twice is instant.",
    )
    parser.add_argument("versions", nargs="*", default=list(RELEASES), help="releases (default: %(default)s)")
    try:
        for version in parser.parse_args(arguments).versions:
            print(f"{version}: {install_wheel(version) or sys.executable}")
    except (T2NError, OSError) as error:
        print(f"install_tract_wheels: {error}", file=sys.stderr)
        return 1
    return 0

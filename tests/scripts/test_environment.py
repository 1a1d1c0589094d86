"""Which Python `scripts/environment.sh` makes the environment with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def found(folder: Path, times: dict[str, int], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `find_python` where interpreters of these names take these times; one that takes none cannot make environments."""
    for name, time in times.items():
        interpreter = folder / name
        interpreter.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exit {int(not time)}; fi\necho {time}\n')
        interpreter.chmod(0o755)
    return subprocess.run(
        ["/bin/bash", "-c", f'PATH="{folder}"; source "{SCRIPTS}/environment.sh" && find_python'],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHON"} | environment,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The one folder of the PATH; the script also needs `dirname`."""
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    return tmp_path


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ({"python3.12": 100, "python3.11": 90, "python3": 90}, "python3.12"),  # no difference to speak of
        ({"python3.12": 100, "python3.11": 50, "python3": 45}, "python3.11"),
        ({"python3.12": 0, "python3": 100}, "python3"),
    ],
)
def test_the_first_unless_another_is_much_faster(folder: Path, times: dict[str, int], taken: str) -> None:
    assert found(folder, times).stdout.strip() == str(folder / taken)


def test_one_that_is_named_is_taken(folder: Path) -> None:
    assert found(folder, {"python3.12": 10, "mine": 100}, PYTHON=str(folder / "mine")).stdout.strip() == str(
        folder / "mine"
    )


def test_none(folder: Path) -> None:
    done = found(folder, {"python3.12": 0})
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr and "hint:" in done.stderr


def test_one_that_is_named_and_cannot_be_used_is_told(folder: Path) -> None:
    done = found(folder, {"python3.12": 10, "mine": 0}, PYTHON=str(folder / "mine"))
    assert done.returncode == 1 and done.stdout == ""
    assert f"error: PYTHON={folder / 'mine'}: no Python 3.11 or newer" in done.stderr

"""Faults that tests/faults and scripts/attack.py share: what an export does to the disk step by step, and how a source is damaged.

In: functions that fail or kill, folders of models. Out: hooks for a process that was forked for it, and changed folders.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from generic_export.files import EXCHANGE_EVENT

# What Python announces (`sys.audit`) before it changes the disk; besides, the opening of a file to write.
STEPS = (
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link", "fcntl.flock"),
    EXCHANGE_EVENT,
)
REMOVALS = ("os.remove", "os.rmdir")
KILLED = 77
WEIGHTS = "model.safetensors"


def watch_steps(act: Callable[[int, str, tuple], None]) -> None:
    """Call `act(number, event, arguments)` before each step that this process does to the disk, from now on and for good."""
    numbers = count()

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in STEPS:
            act(next(numbers), event, arguments)

    sys.addaudithook(hook)


def die_at(step: int) -> None:
    """Let this process die before that step and without a last word, with exit code `KILLED`."""

    def die(number: int, event: str, arguments: tuple) -> None:
        del event, arguments
        if number >= step:
            os._exit(KILLED)

    watch_steps(die)


def kill_at(step: int) -> None:
    """Let this process be killed before that step, as by SIGKILL from outside."""

    def kill(number: int, event: str, arguments: tuple) -> None:
        del event, arguments
        if number >= step:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    watch_steps(kill)


def fail_at(step: int, number: int, folder: Path, *, lasting: bool) -> None:
    """Let one step below a folder fail with an error of the system, or all from there on but removals.

    Args:
        step: the first of them, counted below the folder alone.
        number: `errno` of the failure.
        folder: where the disk is bad.
        lasting: all later ones fail too.
    """
    below = count()

    def fail(_: int, event: str, arguments: tuple) -> None:
        path = arguments[0] if arguments else ""
        if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(folder):
            return
        here = next(below)
        if here == step or (lasting and here > step and event not in REMOVALS):
            raise OSError(number, os.strerror(number), str(path))

    watch_steps(fail)


# --- sources that somebody writes to ----------------------------------------------------------


def zeros(folder: Path) -> bytes:
    """Return the checkpoint of a folder with all its values zero: same header, same length."""
    data = (folder / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start] + bytes(len(data) - start)


def replaced(folder: Path) -> None:
    """Put another checkpoint in the place of the one that is there."""
    (folder / "new").write_bytes(zeros(folder))
    (folder / "new").replace(folder / WEIGHTS)


def overwritten(folder: Path) -> None:
    """Write other values into the checkpoint."""
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(zeros(folder))


def truncated(folder: Path) -> None:
    """Cut the checkpoint off."""
    os.truncate(folder / WEIGHTS, 4096)


def deleted(folder: Path) -> None:
    """Delete the checkpoint."""
    (folder / WEIGHTS).unlink()


def lost_config(folder: Path) -> None:
    """Delete a small file of the model."""
    (folder / "generation_config.json").unlink()


def other_config(folder: Path) -> None:
    """Change the config to that of another model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))


# damage -> the file that an error has to name, and a word of what happened to it
DAMAGES: dict[Callable[[Path], None], tuple[str, str]] = {
    replaced: (WEIGHTS, "replaced"),
    overwritten: (WEIGHTS, "written to"),
    truncated: (WEIGHTS, "written to"),
    deleted: (WEIGHTS, "deleted"),
    lost_config: ("generation_config.json", "deleted"),
    other_config: ("config.json", "written to"),
}

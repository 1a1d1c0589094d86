"""Processes of the system: who descends from whom, what they hold in memory, and how to end them all.

Linux reads proc(5); elsewhere `ps` says the same, more slowly.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessInfo:
    """One process: its parent, and the bytes that it holds in memory."""

    pid: int
    parent: int
    rss_bytes: int


def process_tree(root: int) -> list[ProcessInfo]:
    """Return a process and all that descend from it, the root first; empty when it is gone."""
    table = {info.pid: info for info in _processes()}
    tree = [table[root]] if root in table else []
    for info in tree:  # grows while it is read
        tree += [child for child in table.values() if child.parent == info.pid]
    return tree


def end_tree(root: int) -> None:
    """Kill a process and all that descend from it."""
    for info in process_tree(root):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(info.pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)  # those that it left behind in its group


def _processes() -> Iterator[ProcessInfo]:
    if not (_PROC / "self" / "stat").exists():
        yield from _ps()
        return
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
            fields = text[text.rindex(")") + 2 :].split()  # the name in brackets may hold anything
            yield ProcessInfo(int(entry.name), int(fields[1]), int(fields[21]) * page)


def _ps() -> Iterator[ProcessInfo]:
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,rss="], capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        pid, parent, kilobytes = (int(field) for field in line.split())
        yield ProcessInfo(pid, parent, kilobytes * 1024)

"""Cells that misbehave in every way that a model may; the name of the architecture says how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from t2n_llm.zoo.verdict import NOT_RUNNABLE, RIGHT, Cell, CellVerdict, Check


def run_cell(cell: Cell, folder: Path, on_stage: Callable[[str], None]) -> CellVerdict:
    """Do what the architecture is called."""
    on_stage(f"stage of {cell.architecture}")
    (folder / "left behind").write_bytes(bytes(1000))
    behaviour = _BEHAVIOURS.get(cell.architecture)
    if behaviour is not None:
        behaviour(folder)
    outcome = NOT_RUNNABLE if cell.architecture == "absent" else RIGHT
    checks = {"prefill": Check(1e-6, 2.0, 1, 1, True)} if outcome == RIGHT else {}
    return CellVerdict(cell.architecture, cell.dtype, outcome, "done", "FakeForCausalLM", checks=checks)


def _hang(folder: Path) -> None:
    # With a child and a grandchild, of which one left the process group.
    code = "import os, subprocess, sys, time; os.setsid(); subprocess.Popen(['sleep', '600']); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code])
    time.sleep(600)


def _ignore_term(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _killed(folder: Path) -> None:
    print("about to be killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _abort(folder: Path) -> None:
    print("thread panicked", file=sys.stderr, flush=True)
    os.abort()


def _eat_memory(folder: Path) -> None:
    held = bytearray()
    while True:
        held += b"x" * (20 << 20)
        time.sleep(0.01)


def _eat_memory_in_a_child(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", "held = b'x' * (600 << 20); import time; time.sleep(600)"], check=False)


def _garbage(folder: Path) -> None:
    sys.stdout.buffer.write(b'\xff\xfe{"outcome": "right"}\n\0' * 2000)
    sys.stdout.flush()
    (folder.parent / "verdict.json").write_bytes(b"\xff garbage")
    os._exit(0)


def _another_verdict(folder: Path) -> None:
    (folder.parent / "verdict.json").write_text(CellVerdict("somebody", "f32", RIGHT, "done").to_json())
    os._exit(0)


def _leave(folder: Path) -> None:
    os._exit(0)


def _system_exit(folder: Path) -> None:
    raise SystemExit(0)


def _raise(folder: Path) -> None:
    raise RuntimeError("nobody caught me")


def _kill_host(folder: Path) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def _noise(folder: Path) -> None:
    os.write(1, b"not a verdict\n")
    print("nor this")


_BEHAVIOURS: dict[str, Callable[[Path], None]] = {
    "hang": _hang,
    "ignore-term": _ignore_term,
    "killed": _killed,
    "abort": _abort,
    "eat-memory": _eat_memory,
    "eat-memory-in-a-child": _eat_memory_in_a_child,
    "garbage": _garbage,
    "another-verdict": _another_verdict,
    "leave": _leave,
    "system-exit": _system_exit,
    "raise": _raise,
    "kill-host": _kill_host,
    "noise": _noise,
}

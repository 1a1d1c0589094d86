"""The process that runs cells: one request a line on stdin, one verdict a line on stdout, a fork for each.

What every cell imports is imported once, here; a cell that hangs, dies or eats memory is a verdict, and takes nobody with
it. Run as `python -m t2n_llm.zoo.host`; the engines (`local.py`, `ray_engine.py`) start as many as they want.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from generic_export.processes import end_tree, process_tree
from t2n_llm.zoo.verdict import CRASHED, MEMORY, TIMEOUT, Cell, CellVerdict

DEFAULT_WORK = "t2n_llm.zoo.cell"
READY = "ready"
_POLL_SECONDS = 0.05
_MEMORY_POLL_SECONDS = 0.2
_LOG_BYTES = 4000
_VERDICT, _STAGE, _LOG, _WORK = "verdict.json", "stage", "log", "work"


@dataclass(frozen=True)
class _Ending:
    """How a process ended, seen from outside."""

    outcome: str
    message: str
    seconds: float
    peak_rss_bytes: int


def run_in_process(cell: Cell, work: ModuleType, *, fresh: bool = False) -> CellVerdict:
    """Run one cell in a process of its own, within its limits; nothing of it is left behind.

    Args:
        cell: what to try.
        work: module with `run_cell(cell, folder, on_stage)`.
        fresh: start a new interpreter instead of forking this one (slower; where forking is not safe).
    """
    folder = Path(tempfile.mkdtemp(prefix="t2n-zoo-"))
    try:
        (folder / _WORK).mkdir()
        pid = _start_fresh(cell, work, folder) if fresh else _fork(cell, work, folder)
        try:
            ending = _watch(pid, cell)
        finally:
            end_tree(pid)  # before it is reaped: until then nobody else can have its id
            os.waitpid(pid, 0)
        return _read_verdict(cell, folder, ending)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fork(cell: Cell, work: ModuleType, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_cell(cell, work, folder)
    return pid


def _start_fresh(cell: Cell, work: ModuleType, folder: Path) -> int:
    command = [sys.executable, "-m", "t2n_llm.zoo.host", "--work", work.__name__, "--one", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(cell.to_json().encode())
    process.stdin.close()
    process.returncode = 0  # `_watch` is who waits for it
    return process.pid


def _be_the_cell(cell: Cell, work: ModuleType, folder: Path) -> NoReturn:
    """Run in the child: everything it prints goes to the log, its verdict to a file."""
    code = 1
    try:
        with suppress(PermissionError):  # a fresh interpreter leads a session already
            os.setsid()
        _die_with_parent()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the host's pipes: whoever reads them must see when it dies
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect(folder / _LOG)
        tempfile.tempdir = str(folder / _WORK)
        os.environ["TMPDIR"] = tempfile.tempdir
        stage = folder / _STAGE
        verdict = work.run_cell(cell, folder / _WORK, lambda name: _write(stage, name))
        _write(folder / _VERDICT, verdict.to_json())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Have the kernel end us when the host dies, where it can (prctl(2), PR_SET_PDEATHSIG)."""
    pr_set_pdeathsig = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _redirect(log: Path) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    # Whatever stood for them in the process that was forked stays there.
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _watch(pid: int, cell: Cell) -> _Ending:
    """Wait for a process, and look at its memory and the clock meanwhile."""
    started = time.monotonic()
    peak, looked = 0, 0.0
    asked_by = os.getppid()
    while True:
        if os.getppid() != asked_by:  # killed: nobody reads the verdict any more
            raise SystemExit(1)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        seconds = time.monotonic() - started
        if ended is not None:
            return _Ending(CRASHED, _how(ended), seconds, peak)
        if seconds - looked >= _MEMORY_POLL_SECONDS:
            looked = seconds
            held = sum(info.rss_bytes for info in process_tree(pid))
            peak = max(peak, held)
            if held > cell.max_rss_bytes:
                message = f"held {held / 1e6:.0f} MB, more than its limit of {cell.max_rss_bytes / 1e6:.0f} MB"
                return _Ending(MEMORY, message, seconds, peak)
        if seconds > cell.timeout_seconds:
            return _Ending(TIMEOUT, f"not done after {cell.timeout_seconds:.0f} s", seconds, peak)
        time.sleep(_POLL_SECONDS)


def _how(ended: os.waitid_result) -> str:
    if ended.si_code == os.CLD_EXITED:
        return f"ended with exit code {ended.si_status} and no verdict"
    return f"killed by {signal.Signals(ended.si_status).name}"


def _read_verdict(cell: Cell, folder: Path, ending: _Ending) -> CellVerdict:
    measured = {"seconds": round(ending.seconds, 2), "peak_rss_bytes": ending.peak_rss_bytes}
    if ending.outcome == CRASHED:  # it ended by itself: it may have left a verdict
        with suppress(OSError, ValueError, TypeError, KeyError):
            verdict = CellVerdict.from_json((folder / _VERDICT).read_text(encoding="utf-8"))
            if verdict.key == cell.key:
                return replace(verdict, **measured)  # type: ignore[arg-type]
    stage = _text(folder / _STAGE) or "start"
    return CellVerdict(
        cell.architecture,
        cell.dtype,
        ending.outcome,
        stage,
        message=ending.message,
        log=_text(folder / _LOG)[-_LOG_BYTES:].strip(),
        **measured,  # type: ignore[arg-type]
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _serve(work: ModuleType, *, fresh: bool) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed here is no answer
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        if line.strip():
            print(run_in_process(Cell.from_json(line), work, fresh=fresh).to_json(), file=answers, flush=True)


def _has_threads() -> bool:
    """Say whether a fork of this process could wait for a lock that a thread holds which it does not have."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) > 1 if tasks.is_dir() else False


def _exit_on_term(signum: int, frame: object) -> NoReturn:
    del signum, frame
    raise SystemExit(143)  # through the `finally` that ends the cell


def main() -> int:
    """Run the host."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", default=DEFAULT_WORK, help="module whose run_cell is run")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for each cell")
    parser.add_argument("--one", type=Path, help="(internal) be the cell on stdin, in this folder")
    options = parser.parse_args()
    work = importlib.import_module(options.work)
    if options.one is not None:
        _be_the_cell(Cell.from_json(sys.stdin.readline()), work, options.one)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; whoever started us decides
    signal.signal(signal.SIGTERM, _exit_on_term)
    preload: Callable[[], None] | None = getattr(work, "preload", None)
    if preload is not None and not options.fresh:
        preload()
    _serve(work, fresh=options.fresh or _has_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())

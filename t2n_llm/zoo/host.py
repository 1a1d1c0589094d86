"""The process that runs cells: one request a line on stdin, one verdict a line on stdout, a fork for each.

What every cell imports is imported once, here; a cell that hangs, dies or eats memory is a verdict, and takes nobody with
it. Run as `python -m t2n_llm.zoo.host`; the engines (`local.py`, `ray_engine.py`) start as many as they want.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import psutil

from generic_export.processes import Ending, Limits, Reason, Send, TaskProcess, start_task, wait_for_news
from t2n_llm.zoo.verdict import CRASHED, MEMORY, TIMEOUT, Cell, Verdict

DEFAULT_WORK = "t2n_llm.zoo.cell"
READY = "ready"
_LOOK_SECONDS = 0.1
_LOG_LENGTH = 4000


def run_in_process(cell: Cell, work: ModuleType, *, fresh: bool = False) -> Verdict:
    """Run one cell in a process of its own, within its limits; nothing of it is left behind.

    Args:
        cell: what to try.
        work: module with `run_cell(cell, folder, on_stage)`.
        fresh: start a new interpreter instead of forking this one (slower; where forking is not safe).
    """
    limits = Limits(cell.timeout_seconds, cell.max_rss_bytes)
    with tempfile.TemporaryDirectory(prefix="t2n-zoo-", ignore_cleanup_errors=True) as folder:
        task = partial(_run_cell, cell, work.__name__, Path(folder))
        with start_task(task, method="spawn" if fresh else "fork", limits=limits) as process:
            verdict = _watch(process, cell)
            return replace(verdict, seconds=round(process.seconds, 2), peak_rss_bytes=process.peak_bytes)


def _run_cell(cell: Cell, work: str, folder: Path, send: Send) -> None:
    """Run in the other process: what it makes goes to the folder, its stages and its verdict to the host."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    own = folder / "work"
    own.mkdir()
    send(importlib.import_module(work).run_cell(cell, own, send))


def _watch(process: TaskProcess, cell: Cell) -> Verdict:
    stage = "start"
    asked_by = os.getppid()
    while True:
        wait_for_news([process], _LOOK_SECONDS)
        if os.getppid() != asked_by:  # killed: nobody reads the verdict any more
            raise SystemExit(1)
        messages, ending = process.news()
        for message in messages:
            if isinstance(message, Verdict):
                return message
            stage = message
        if ending is not None:
            outcome, words = _explained(ending, cell, process.peak_bytes)
            log = ending.output[-_LOG_LENGTH:].strip()
            return Verdict(cell.architecture, cell.dtype, outcome, stage, message=words, log=log)


def _explained(ending: Ending, cell: Cell, peak_bytes: int) -> tuple[str, str]:
    """Return the outcome and the message for a process that ended without a verdict."""
    if ending.reason is Reason.OVERTIME:
        return TIMEOUT, f"not done after {cell.timeout_seconds:.0f} s"
    if ending.reason is Reason.MEMORY:
        limit = cell.max_rss_bytes / 1e6
        return MEMORY, f"held {peak_bytes / 1e6:.0f} MB, more than its limit of {limit:.0f} MB"
    if ending.exit_code < 0:
        return CRASHED, f"killed by {ending.cause}"
    return CRASHED, f"ended with {ending.cause} and no verdict"


def _serve(work: ModuleType, *, fresh: bool) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed here is no answer
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        if line.strip():
            print(run_in_process(Cell.from_json(line), work, fresh=fresh).to_json(), file=answers, flush=True)


def _exit_on_term(signum: int, frame: object) -> NoReturn:
    del signum, frame
    raise SystemExit(143)  # through the `finally` that ends the cell


def main() -> int:
    """Run the host."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", default=DEFAULT_WORK, help="module whose run_cell is run")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for each cell")
    options = parser.parse_args()
    work = importlib.import_module(options.work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; whoever started us decides
    signal.signal(signal.SIGTERM, _exit_on_term)
    preload: Callable[[], None] | None = getattr(work, "preload", None)
    if preload is not None and not options.fresh:
        preload()
    # A fork of a process with threads could wait for a lock that a thread holds which it does not have.
    _serve(work, fresh=options.fresh or psutil.Process().num_threads() > 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

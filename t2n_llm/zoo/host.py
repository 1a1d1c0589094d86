"""The process that runs cells, one after the other: a cell comes, a verdict goes, a fork for each.

What every cell imports is imported once, here; a cell that hangs, dies or eats memory is a verdict, and takes nobody with
it. The engines (`local.py`, `ray_engine.py`) start as many as they want.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import psutil

from generic_export.processes import Ending, ProcessLimits, Reason, TaskProcess, start_task, wait_for_news
from t2n_llm.zoo.full_size import judged
from t2n_llm.zoo.verdict import CRASHED, MEMORY, TIMEOUT, Cell, CellVerdict

DEFAULT_WORK = "t2n_llm.zoo.cell"
_LOOK_SECONDS = 0.1
_LOG_LENGTH = 4000


def run_in_process(cell: Cell, work: ModuleType, *, fresh: bool = False) -> CellVerdict:
    """Run one cell in a process of its own, within its limits; nothing of it is left behind.

    Args:
        cell: what to try.
        work: module with `run_cell(cell, folder, on_stage)`.
        fresh: start a new interpreter instead of forking this one (slower; where forking is not safe).
    """
    limits = ProcessLimits(cell.timeout_seconds, cell.max_rss_bytes)
    with tempfile.TemporaryDirectory(prefix="t2n-zoo-", ignore_cleanup_errors=True) as folder:
        task = partial(_run_cell, cell, work.__name__, Path(folder))
        with start_task(task, method="spawn" if fresh else "fork", limits=limits) as process:
            verdict = _watch(process, cell)
            peak = max(verdict.peak_rss_bytes, process.peak_bytes)  # the process itself misses no moment
            return judged(replace(verdict, seconds=round(process.seconds, 2), peak_rss_bytes=peak))


def _run_cell(cell: Cell, work: str, folder: Path, host: Connection) -> None:
    """Run in the other process: what it makes goes to the folder, its stages and its verdict to the host."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    own = folder / "work"
    own.mkdir()
    host.send(importlib.import_module(work).run_cell(cell, own, host.send))


def _watch(process: TaskProcess, cell: Cell) -> CellVerdict:
    stage = "start"
    while True:
        wait_for_news([process], _LOOK_SECONDS)
        messages, ending = process.news()
        for message in messages:
            if isinstance(message, CellVerdict):
                return message
            stage = message
        if ending is not None:
            outcome, words = _explained(ending, cell, process.peak_bytes)
            log = ending.output[-_LOG_LENGTH:].strip()
            return cell.ended(outcome, stage, message=words, log=log)


def _explained(ending: Ending, cell: Cell, peak_bytes: int) -> tuple[str, str]:
    """Return the outcome and the message for a process that ended without a verdict."""
    if ending.reason is Reason.OVERTIME:
        return TIMEOUT, f"not finished after {cell.timeout_seconds:.0f} s"
    if ending.reason is Reason.MEMORY:
        limit = cell.max_rss_bytes / 1e6
        return MEMORY, f"used {peak_bytes / 1e6:.0f} MB, more than the limit of {limit:.0f} MB"
    if ending.exit_code < 0:
        return CRASHED, f"killed by {ending.cause}"
    return CRASHED, f"ended with {ending.cause} and without a verdict"


def serve(work: str, environment: Mapping[str, str], fresh: bool, asker: Connection) -> None:
    """Be a host: answer cells with verdicts until nobody asks any more.

    Args:
        work: module with `run_cell`, and maybe `preload`.
        environment: set before anything that reads it is imported.
        fresh: a new interpreter for each cell.
        asker: sends cells, and is sent verdicts.
    """
    os.environ.update(environment)
    os.dup2(2, 1)  # nothing that is printed here is a result
    module = importlib.import_module(work)
    threads = psutil.Process().num_threads()
    fresh = fresh or "fork" not in multiprocessing.get_all_start_methods()  # Windows
    if not fresh:
        getattr(module, "preload", lambda: None)()
        # A fork of a process with threads could wait for a lock that a thread holds which it does not have.
        fresh = psutil.Process().num_threads() > threads
    while True:
        try:
            cell = asker.recv()
        except EOFError:
            return
        asker.send(run_in_process(cell, module, fresh=fresh))

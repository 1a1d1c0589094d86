"""A task in a process of its own: what it sends, how it ends, and that nothing of it stays."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from generic_export.processes import Ending, ProcessLimits, Reason, TaskProcess, start_task, wait_for_news
from tests.systems import WINDOWS, needs_posix

METHODS = ["spawn"] if WINDOWS else ["fork", "spawn"]


def _count(last: int, parent: Connection) -> None:
    for number in range(last):
        print(f"counted {number}", flush=True)
        parent.send(number)


def _raise(parent: Connection) -> None:
    raise ValueError("no good")


def _die(parent: Connection) -> None:
    parent.send("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def _start_another(parent: Connection) -> None:
    parent.send(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    time.sleep(600)


def _followed(process: TaskProcess) -> tuple[list[Any], Ending]:
    sent: list[Any] = []
    while True:
        wait_for_news([process], 0.1)
        messages, ending = process.news()
        sent += messages
        if ending is not None:
            return sent, ending


@pytest.mark.parametrize("method", METHODS)
def test_what_it_sends_and_prints_arrives(method: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with start_task(partial(_count, 300), method=method) as process:
        sent, ending = _followed(process)
    assert sent == list(range(300))
    assert (ending.reason, ending.cause) == (Reason.ENDED, "exit code 0")
    assert ending.output.splitlines()[-1] == "counted 299"
    assert capfd.readouterr().out == ""


def test_its_output_may_go_where_ours_goes(capfd: pytest.CaptureFixture[str]) -> None:
    with start_task(partial(_count, 1), method="spawn", keep_output=False) as process:
        _, ending = _followed(process)
    assert ending.output == ""
    assert capfd.readouterr().out == "counted 0\n"


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_is_told_in_its_output(method: Any) -> None:
    with start_task(_raise, method=method) as process:
        sent, ending = _followed(process)
    assert sent == []
    assert ending.cause == "exit code 1"
    assert ending.output.splitlines()[-1] == "ValueError: no good"


@needs_posix
def test_a_killed_one_is_known_by_its_signal() -> None:
    with start_task(_die, method="fork") as process:
        sent, ending = _followed(process)
    assert sent == ["last words"]
    assert (ending.reason, ending.exit_code, ending.cause) == (Reason.ENDED, -9, "SIGKILL")


def test_one_that_cannot_be_started_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        start_task(lambda parent: None, method="spawn")  # a lambda cannot be pickled
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["limit", "close", "collection"])
def test_all_that_it_started_ends_with_it(end: str) -> None:
    limits = ProcessLimits(seconds=3.0 if end == "limit" else 600.0)  # a new interpreter needs a second to say anything
    process = start_task(_start_another, method=METHODS[0], limits=limits)
    other = None
    while other is None:
        wait_for_news([process], 0.1)
        messages, _ = process.news()
        other = psutil.Process(messages[0]) if messages else None
    started = psutil.Process(process.pid)
    if end == "limit":
        assert _followed(process)[1].reason is Reason.OVERTIME
    elif end == "close":
        process.close()
        process.close()
    del process
    gc.collect()
    until = time.monotonic() + 10
    while (_alive(started) or _alive(other)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _alive(started) and not _alive(other)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

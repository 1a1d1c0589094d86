"""An attempt beyond its limits ends with all that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from generic_export.debug.attempt.worker import Limits, Worker, wait_for_news
from generic_export.debug.records import Stage, Verdict
from generic_export.processes import process_tree


def ended(worker: Worker) -> Verdict:
    while True:
        verdict = worker.look()
        if verdict is not None:
            return verdict
        wait_for_news([worker])


@pytest.mark.parametrize(
    ("limits", "code", "kind"),
    [
        (Limits(seconds=1.5), "import time; time.sleep(60)", "TimeLimitError"),
        (Limits(memory="64MiB"), "held = bytearray(300 << 20); import time; time.sleep(60)", "MemoryLimitError"),
    ],
)
def test_what_an_attempt_started_ends_with_it(tmp_path: Path, limits: Limits, code: str, kind: str) -> None:
    """The child does not look at who started it, as an engine in an endless load does not."""
    note = tmp_path / "pid"

    def task(tell: Callable[[Stage], None]) -> Verdict:
        child = subprocess.Popen([sys.executable, "-c", code])
        note.write_text(str(child.pid))
        child.wait()
        os._exit(1)

    verdict = ended(Worker("key", "path", task, limits))
    assert verdict.error is not None and verdict.error.kind == kind
    child = int(note.read_text())
    deadline = time.monotonic() + 10
    while process_tree(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_tree(child)

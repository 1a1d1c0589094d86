"""The threads that write an archive: what becomes of tasks when a thread ends without a word."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

import pytest

from generic_export.errors import ArchiveError
from generic_export.write.worker_threads import WorkerThreads

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def _run_while_tracing(ending: int, tasks: int) -> list[int]:
    """Run tasks while a tracer, such as that of a coverage tool, ends so many threads before their work."""
    lock, ended, done = threading.Lock(), [0], []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name == "_work":
            with lock:
                ended[0] += 1
                if ended[0] <= ending:
                    raise RuntimeError("the tracer ends this thread")

    threading.settrace(trace)
    try:
        WorkerThreads().run([lambda _crew, number=number: done.append(number) for number in range(tasks)])  # type: ignore[misc]
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    return done


def test_the_other_threads_do_the_tasks_of_one_that_a_tracer_ended() -> None:
    assert sorted(_run_while_tracing(ending=1, tasks=5)) == [0, 1, 2, 3, 4]


def test_tasks_that_no_thread_did_are_an_error() -> None:
    with pytest.raises(ArchiveError, match="ended early"):
        _run_while_tracing(ending=100, tasks=5)

"""An attempt in a process of its own, which may crash, hang or eat all memory: each is a verdict, not the end.

In: a task that gives a `Verdict` and tells its stages. Out: the verdict, or one that says how the process died. A worker is a fork
of this process, so it has PyTorch and the model at once; what it changes of them stays its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch

from generic_export.diagnose.record.store import parse_bytes
from generic_export.diagnose.records import ErrorRecord, Outcome, Stage, Verdict
from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.engine import last_words
from generic_export.inference_target.tract.evidence.redaction import redacted
from generic_export.processes import end_tree, process_tree

Task = Callable[[Callable[[Stage], None]], Verdict]

_LOOK_SECONDS = 0.1
_MEMORY_LOOK_SECONDS = 0.2
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What one attempt may take.

    Attributes:
        seconds: wall-clock time.
        memory: bytes beyond what this process holds already, the engine's included, such as `8GiB`.
    """

    seconds: float = 300.0
    memory: str | int = "8GiB"

    @property
    def memory_bytes(self) -> int:
        """The memory limit in bytes."""
        return parse_bytes(self.memory)


class Worker:
    """One running attempt.

    Args:
        key, path: of the piece, for the verdict of a process that died.
        task: what to do; runs in the fork.
        limits: what it may take.
        isolated: for that verdict, too.

    Raises:
        OptionError: this system cannot fork.
    """

    def __init__(self, key: str, path: str, task: Task, limits: Limits, *, isolated: bool = False) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise OptionError("a diagnosis needs a system that can fork processes (Linux, macOS).")
        self.key, self.path, self.isolated = key, path, isolated
        self._limits = limits
        self._stage: Stage | None = None
        self._began = time.monotonic()
        self._peak, self._looked = 0, 0.0
        self._output = tempfile.TemporaryFile(prefix="diagnose-worker-")  # noqa: SIM115 - lives as long as the worker
        self._baseline = sum(info.rss_bytes for info in process_tree(os.getpid())[:1])
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(task, theirs, self._output, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of PyTorch: the fork uses one of its own
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    @property
    def stage(self) -> Stage | None:
        """The stage that it told last."""
        return self._stage

    def look(self) -> Verdict | None:
        """Return the verdict once there is one; kills a worker that is beyond its limits."""
        try:
            while self._connection.poll():
                message = self._connection.recv()
                if isinstance(message, Verdict):
                    return self._finished(message)
                self._stage = message
        except (EOFError, ConnectionResetError):
            return self._died()
        return self._within_limits()

    def kill(self) -> None:
        """End it without a verdict, and the engine that it started with it."""
        if self._process.pid is not None and self._process.is_alive():
            end_tree(self._process.pid)
        self._close()

    def _finished(self, verdict: Verdict) -> Verdict:
        self._close()
        return replace(verdict, seconds=time.monotonic() - self._began, peak_rss=self._peak)

    def _within_limits(self) -> Verdict | None:
        now = time.monotonic()
        if now - self._looked >= _MEMORY_LOOK_SECONDS:
            self._looked, self._peak = now, max(self._peak, self._held())
        if now - self._began > self._limits.seconds:
            self.kill()
            return self._dead("TimeLimitError", f"no end after {self._limits.seconds:g} s", "Raise limits.seconds.")
        if self._peak > self._limits.memory_bytes:
            self.kill()
            used = f"{self._peak / 2**30:.1f} GiB"
            return self._dead(
                "MemoryLimitError", f"took {used}, {self._limits.memory} are allowed", "Raise limits.memory."
            )
        return None

    def _held(self) -> int:
        """Return the bytes that it and what it started hold, without those shared with this process since the fork."""
        held = [info.rss_bytes for info in process_tree(self._process.pid or 0)]
        return max(0, sum(held[:1]) - self._baseline) + sum(held[1:])

    def _died(self) -> Verdict:
        self._process.join(timeout=10)
        code = self._process.exitcode
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        words = last_words(self._tail())
        self._close()
        hint = "Most often the machine ran out of memory." if cause == "SIGKILL" else ""
        return self._dead("WorkerDiedError", f"the process died ({cause}){f': {words}' if words else ''}", hint)

    def _dead(self, kind: str, message: str, hint: str) -> Verdict:
        return Verdict(
            key=self.key,
            path=self.path,
            outcome=Outcome.FAILED,
            stage=self._stage or Stage.CAPTURE,
            isolated=self.isolated,
            error=ErrorRecord(kind, redacted(message), hint),
            seconds=time.monotonic() - self._began,
            peak_rss=self._peak,
        )

    def _tail(self) -> str:
        descriptor = self._output.fileno()
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        return os.pread(descriptor, _TAIL_BYTES, start).decode(errors="replace")

    def _close(self) -> None:
        self._process.join(timeout=10)
        self._connection.close()
        self._output.close()

    @property
    def waitables(self) -> tuple[Any, ...]:
        """What becomes readable when there is news."""
        return (self._connection,)


def wait_for_news(workers: Sequence[Worker], seconds: float = _LOOK_SECONDS) -> None:
    """Sleep until a worker has something to say, or it is time to look at their memory."""
    wait([waitable for worker in workers for waitable in worker.waitables], timeout=seconds)


# --- in the fork ----------------------------------------------------------------------------------


def _serve(task: Task, connection: Connection, output: IO[bytes], parent: int) -> None:
    """Run the task and send what it gives; never returns to the caller's code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    torch.set_num_threads(1)  # the thread pools of the parent do not exist here
    threading.Thread(target=_leave_with_parent, args=(parent,), daemon=True).start()
    try:
        connection.send(task(connection.send))
    except BaseException as error:
        # To the descriptor itself: sys.stderr may be something else of the parent's.
        words = f"{traceback.format_exc()}\nError: {type(error).__name__}: {error}\n"
        os.write(2, words.encode(errors="replace"))
        os._exit(70)
    os._exit(0)  # nothing of the parent's is cleaned up here


def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


__all__ = ["Limits", "Task", "Worker", "wait_for_news"]

"""The child process in which the pip-installed tract works, and the requests to it.

In: a method of `wheel_worker.EngineWorker` and its arguments. Out: what it returns, or an exception of `errors.py`: whatever
becomes of the child, whoever asks is told how it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from generic_export.errors import (
    EngineCrashError,
    EngineError,
    EngineMissingError,
    EngineRunError,
    EngineTimeoutError,
)
from generic_export.inference_target.tract.engines import wheel_worker
from generic_export.inference_target.tract.engines.engine import condense_error, last_words
from generic_export.processes import Child

WHEEL_VERSION = "0.23.9"  # the release that facts/tract.md describes and that the tests run

INSTALL_HINT = f"Install it: pip install tract=={WHEEL_VERSION}"
_PIPE_BYTES = 1 << 20
_WORKER_ENVIRONMENT = {
    "RUST_BACKTRACE": "0",  # otherwise backtraces end up in error messages
    "PYTHONSAFEPATH": "1",  # the worker's own folder must not shadow modules
}
_MEMORY_WORDS = ("memory allocation of", "failed to allocate")  # Rust's allocator, tract's own
_MEMORY_HINT = "The engine got no more memory: run it on a smaller input, or where there is more."
_SIGNAL_HINTS = {
    "SIGABRT": "tract panicked; this is how it answers some malformed graphs and out-of-range indices.",
    "SIGSEGV": "tract read invalid memory.",
    "SIGKILL": "It was killed from outside; most often the machine ran out of memory.",
    "SIGILL": "The tract build uses instructions that this CPU lacks.",
}


class _OverdueError(Exception):
    """The deadline of a request has passed."""


class WorkerProcess:
    """The child, and one request at a time to it. However it ends, it ends: no request leaves it half spoken to."""

    def __init__(
        self, subject: str, timeout_seconds: float, packages: Path | None = None, threads: int | None = None
    ) -> None:
        self._subject = subject  # what error messages are about: the archive
        self.closed_sessions: deque[int] = deque()  # appended to by finalizers, at any moment
        self._timeout_seconds = timeout_seconds
        self._lock = threading.RLock()
        self._end: tuple[type[EngineError], str, str | None] | None = None
        printed = tempfile.TemporaryFile(prefix="tract-stderr-")  # noqa: SIM115 - lives as long as the child
        process = subprocess.Popen(
            [sys.executable, "-u", wheel_worker.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env=_environment(packages, threads),
            bufsize=0,
        )
        self._child = Child(process, printed, process.stdin, process.stdout)
        self._stdin, self._stdout = _pipe(process.stdin), _pipe(process.stdout)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._end is None

    def close(self) -> None:
        """Kill the child; it holds nothing worth saving. A request running in another thread ends with it."""
        self._end = self._end or (EngineRunError, f"{self._subject}: the model is closed.", "Load it again.")
        self._child.kill()
        with self._lock:
            self._child.close()

    def request(self, method: str, *arguments: Any, refusal: type[EngineError] = EngineRunError) -> Any:
        """Send one request and wait for its reply.

        Args:
            method: a method of `wheel_worker.EngineWorker`.
            arguments: its arguments.
            refusal: the exception to raise when the engine answers with an error.
        """
        with self._lock:
            self._require_alive()
            try:
                status, value = self._exchange((method, arguments, self._take_closed()))
            except (EOFError, BrokenPipeError):
                self._require_alive()  # closed by another thread: say so, instead of reporting a crash
                self._fail(EngineCrashError, *self._post_mortem(method))
            except _OverdueError:
                message = (
                    f"{self._subject}: no end of the {method} after {self._timeout_seconds:g} s; tract was stopped."
                )
                self._fail(EngineTimeoutError, message, "Raise timeout_seconds, or use a smaller input.")
            except BaseException:  # KeyboardInterrupt and the like: the conversation is cut in the middle
                self.close()
                raise
        if status == "missing":
            self.close()
            raise EngineMissingError(f"the Python package tract does not import: {value}.", INSTALL_HINT)
        if status == "error":
            raise refusal(f"{self._subject}: tract refused the {method}: {condense_error(value)}.")
        return value

    def _require_alive(self) -> None:
        if self._end is not None:
            kind, message, hint = self._end
            raise kind(message, hint)

    def _take_closed(self) -> list[int]:
        return [self.closed_sessions.popleft() for _ in range(len(self.closed_sessions))]

    def _exchange(self, message: Any) -> tuple[str, Any]:
        deadline = time.monotonic() + self._timeout_seconds
        wheel_worker.write_message(message, self._within(deadline, self._stdin, select.POLLOUT, os.write))
        reply: tuple[str, Any] = wheel_worker.read_message(
            self._within(deadline, self._stdout, select.POLLIN, lambda pipe, view: os.readv(pipe, [view]))
        )
        return reply

    @staticmethod
    def _within(
        deadline: float, pipe: int, event: int, move: Callable[[int, memoryview], int]
    ) -> Callable[[memoryview], None]:
        """Return a function that moves a whole view through a non-blocking pipe, or raises when time is up."""
        poller = select.poll()
        poller.register(pipe, event)

        def move_all(view: memoryview) -> None:
            while view:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not poller.poll(remaining * 1000):
                    raise _OverdueError
                count = move(pipe, view)
                if not count:
                    raise EOFError
                view = view[count:]

        return move_all

    def _post_mortem(self, method: str) -> tuple[str, str | None]:
        """Say how the child died, and why as far as its stderr tells."""
        ending = self._child.ending(patience=30)
        why = last_words(ending.output)
        starved = any(words in (why or "") for words in _MEMORY_WORDS)
        hint = _MEMORY_HINT if starved else _SIGNAL_HINTS.get(ending.cause)
        return f"{self._subject}: tract died during the {method} ({ending.cause}): {why or 'no message'}.", hint

    def _fail(self, kind: type[EngineError], message: str, hint: str | None) -> NoReturn:
        self._end = (kind, message, hint)
        self.close()
        raise kind(message, hint) from None


def _pipe(stream: IO[bytes] | None) -> int:
    if stream is None:
        raise EngineError("the worker process has no pipe.")
    os.set_blocking(stream.fileno(), False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # the user's pipe quota is used up; the default size is only slower
            fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return stream.fileno()


def _environment(packages: Path | None, threads: int | None = None) -> dict[str, str]:
    """Return the environment of a worker: a folder of packages stands before the installed ones."""
    environment = {**os.environ, **_WORKER_ENVIRONMENT}
    if threads is not None:
        # Attention with FlashSDPA alone takes more than one (facts/tract.md §6).
        environment["RAYON_NUM_THREADS"] = str(threads)
    if packages is not None:
        others = [path for path in [environment.get("PYTHONPATH")] if path]
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *others])
    return environment


__all__ = ["INSTALL_HINT", "WHEEL_VERSION", "WorkerProcess"]

"""The child process in which the pip-installed tract runs, and the requests of one model to it.

In: a method of `wheel_worker.EngineWorker` and its arguments. Out: its result, or an exception of `errors.py` that reports how
the child ended. Inside `reuse_workers()`, the child of a closed model serves the next model.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from generic_export.child_pipes import OverdueError, start_program
from generic_export.errors import EngineCrashError, EngineError, EngineMissingError, EngineRunError, EngineTimeoutError
from generic_export.inference_target.tract.engines import wheel_worker
from generic_export.inference_target.tract.engines.engine import condense_error, last_words

WHEEL_VERSION = "0.23.9"  # the release that docs/contributing/engine-facts.md describes and that the tests run

INSTALL_HINT = f"Install it: pip install tract=={WHEEL_VERSION}"
_RESET_SECONDS = 10.0
_MOST_IDLE = 4
_SETTING_PREFIXES = ("PYTHON", "RAYON", "RUST", "TRACT", "LD_", "DYLD_", "CUDA", "MALLOC", "GLIBC")
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


@dataclass(frozen=True)
class WorkerSettings:
    """What an engine process is started with. Two models may use the same process only where these are equal.

    Attributes:
        executable: the Python interpreter.
        environment: the variables that it, tract and the C library read, sorted by name.
    """

    executable: str
    environment: tuple[tuple[str, str], ...]


class WorkerProcess:
    """One child process and the pipes to it. It holds one model at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.settings = _settings(environment)
        command = [sys.executable, "-u", wheel_worker.__file__, str(os.getpid())]
        self.child, self._pipes = start_program(command, environment)

    def exchange(self, message: Any, timeout_seconds: float) -> tuple[str, Any]:
        """Send one message and wait for its reply.

        Raises:
            OverdueError: there was no reply in time; the child was killed.
            EOFError: the child died.
        """
        with self._pipes.within(timeout_seconds):
            wheel_worker.write_message(message, self._pipes.write)
            reply: tuple[str, Any] = wheel_worker.read_message(self._pipes.fill)
        return reply

    def reset(self) -> bool:
        """Free the model and its sessions. Return whether the process is then as good as a new one."""
        try:
            status, clean = self.exchange(("reset", (), []), _RESET_SECONDS)
        except (EOFError, OverdueError):
            return False
        except BaseException:  # KeyboardInterrupt and the like: the exchange stopped in the middle
            self.child.close()
            raise
        self.child.forget_output()
        return status == "ok" and bool(clean)


class WorkerPool:
    """Idle engine processes, for the process and the `with` block that made the pool."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._idle: list[WorkerProcess] = []

    @property
    def usable(self) -> bool:
        """Whether this process made the pool and has not closed it. A fork must not write to its parent's children."""
        return os.getpid() == self._owner

    def take(self, environment: dict[str, str]) -> WorkerProcess:
        """Return an idle process with the same settings, or start one."""
        settings = _settings(environment)
        for process in reversed(self._idle):
            if process.settings == settings:
                self._idle.remove(process)
                if not process.child.has_ended():
                    return process
                process.child.close()
        return WorkerProcess(environment)

    def give_back(self, process: WorkerProcess) -> None:
        """Keep a process for the next model, if it resets cleanly; otherwise end it."""
        if not process.reset():
            process.child.close()
            return
        self._idle.append(process)
        if len(self._idle) > _MOST_IDLE:
            self._idle.pop(0).child.close()

    def close(self) -> None:
        """End the idle processes; models that are still open end theirs when they are closed."""
        self._owner = 0
        while self._idle:
            self._idle.pop().child.close()


_POOL: ContextVar[WorkerPool | None] = ContextVar("engine_worker_pool", default=None)


@contextmanager
def reuse_workers(reuse: bool = True) -> Iterator[None]:
    """Within the block, let the engine process of a closed model load the next one: 0.03 s instead of 0.3 s.

    A process is replaced when it dies, when a request is interrupted, and when it holds more than 256 MiB without a model.
    Models that are open at the same time have a process each. Blocks can be nested; threads started in a block do not share its
    processes.

    Args:
        reuse: False gives every model in the block a new process.
    """
    pool = _current_pool()
    if reuse and pool is not None:
        yield
        return
    pool = WorkerPool() if reuse else None
    token = _POOL.set(pool)
    try:
        yield
    finally:
        _POOL.reset(token)
        if pool is not None:
            pool.close()


def _current_pool() -> WorkerPool | None:
    pool = _POOL.get()
    return pool if pool is not None and pool.usable else None


class WorkerConnection:
    """What one model asks of a child process, one request at a time. After a failure or an interrupt, the child is killed."""

    def __init__(
        self, subject: str, timeout_seconds: float, packages: Path | None = None, threads: int | None = None
    ) -> None:
        self._subject = subject  # what error messages are about: the archive
        self.closed_sessions: deque[int] = deque()  # appended to by finalizers, at any moment
        self._timeout_seconds = timeout_seconds
        self._lock = threading.RLock()
        self._in_request = self._gave_back = False
        self._end: tuple[type[EngineError], str, str | None] | None = None
        environment = _environment(packages, threads)
        self._pool = _current_pool()
        self._process = WorkerProcess(environment) if self._pool is None else self._pool.take(environment)

    @property
    def pid(self) -> int:
        return self._process.child.pid

    @property
    def alive(self) -> bool:
        return self._end is None

    def close(self) -> None:
        """Give an idle child back to the pool, or kill the child. A request running in another thread ends with it."""
        if self._gave_back:
            return
        if self._end is None and self._lock.acquire(blocking=False):
            try:
                if not self._in_request and self._pool is not None and self._pool.usable:
                    self._mark_closed()
                    self._gave_back = True
                    self._pool.give_back(self._process)
                    return
            finally:
                self._lock.release()
        self._kill()

    def _mark_closed(self) -> None:
        self._end = self._end or (EngineRunError, f"{self._subject}: the model is closed.", "Load it again.")

    def _kill(self) -> None:
        self._mark_closed()
        self._process.child.kill()
        with self._lock:
            self._process.child.close()

    def request(self, method: str, *arguments: Any, refusal: type[EngineError] = EngineRunError) -> Any:
        """Send one request and wait for its reply.

        Args:
            method: a method of `wheel_worker.EngineWorker`.
            arguments: its arguments.
            refusal: the exception to raise when the engine answers with an error.
        """
        with self._lock:
            self._require_alive()
            self._in_request = True
            try:
                status, value = self._process.exchange((method, arguments, self._take_closed()), self._timeout_seconds)
            except EOFError:
                self._require_alive()  # closed by another thread: say so, instead of reporting a crash
                self._fail(EngineCrashError, *self._post_mortem(method))
            except OverdueError:
                message = (
                    f"{self._subject}: no end of the {method} after {self._timeout_seconds:g} s; tract was stopped."
                )
                self._fail(EngineTimeoutError, message, "Raise timeout_seconds, or use a smaller input.")
            except BaseException:  # KeyboardInterrupt and the like: the exchange stopped in the middle
                self._kill()
                raise
            self._in_request = False
        if status == "missing":
            self._kill()
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

    def _post_mortem(self, method: str) -> tuple[str, str | None]:
        """Say how the child died, and why as far as its stderr tells."""
        ending = self._process.child.ending(patience=30)
        why = last_words(ending.output)
        starved = any(words in (why or "") for words in _MEMORY_WORDS)
        hint = _MEMORY_HINT if starved else _SIGNAL_HINTS.get(ending.cause)
        return f"{self._subject}: tract died during the {method} ({ending.cause}): {why or 'no message'}.", hint

    def _fail(self, kind: type[EngineError], message: str, hint: str | None) -> NoReturn:
        self._end = (kind, message, hint)
        self._kill()
        raise kind(message, hint) from None


def _settings(environment: dict[str, str]) -> WorkerSettings:
    read = ((name, value) for name, value in sorted(environment.items()) if name.startswith(_SETTING_PREFIXES))
    return WorkerSettings(sys.executable, tuple(read))


def _environment(packages: Path | None, threads: int | None = None) -> dict[str, str]:
    """Return the environment of a worker: a folder of packages stands before the installed ones."""
    environment = {**os.environ, **_WORKER_ENVIRONMENT}
    if threads is not None:
        # Attention with FlashSDPA alone takes more than one (docs/contributing/engine-facts.md#threads).
        environment["RAYON_NUM_THREADS"] = str(threads)
    if packages is not None:
        others = [path for path in [environment.get("PYTHONPATH")] if path]
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *others])
    return environment


__all__ = ["INSTALL_HINT", "WHEEL_VERSION", "WorkerConnection", "reuse_workers"]

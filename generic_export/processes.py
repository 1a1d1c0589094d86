"""Processes that this one starts: their limits, what they print, how they end, and the end of all that they start.

In: a task to do in a process of its own (`start_task`), or a program that runs (`Child`). Out: what the task sends, an `Ending`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, Literal

import psutil

_MEMORY_LOOK_SECONDS = 0.2
_TAIL_BYTES = 1 << 16

Task = Callable[[Connection], None]


@dataclass(frozen=True)
class ProcessLimits:
    """What a process and those that it starts may take together: seconds of the clock, and bytes of memory."""

    seconds: float = inf
    memory_bytes: float = inf


class Reason(Enum):
    """Why a process ended: by itself or somebody's signal, or because it was beyond a limit."""

    ENDED = auto()
    OVERTIME = auto()
    MEMORY = auto()


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        reason: ours, where it was beyond a limit.
        exit_code: as `subprocess` has it: negative for a signal.
        output: the last that it printed, up to 64 KiB; "" when that was not kept.
    """

    reason: Reason
    exit_code: int
    output: str

    @property
    def cause(self) -> str:
        """The signal's name, such as `SIGKILL`, or `exit code 3`."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else f"exit code {self.exit_code}"


def process_tree(root: int | psutil.Process) -> list[psutil.Process]:
    """Return a process and all that descend from it, the root first; empty when it is gone."""
    try:
        process = psutil.Process(root) if isinstance(root, int) else root
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_tree(root: psutil.Process) -> None:
    """Kill a process and all that descend from it."""
    tree = process_tree(root)
    for process in tree:
        with suppress(psutil.Error):
            process.kill()
    if sys.platform == "win32":
        return
    for process in tree:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # those that it left behind in a group of its own


class Child:
    """A process that this one started. When it is closed, collected, or this process exits, all that it started ends with it.

    Args:
        process: as it was started.
        output: file that it prints to.
        streams: more of ours that is closed with it.

    Attributes:
        system: handle of the process in psutil.
    """

    def __init__(self, process: subprocess.Popen[bytes] | BaseProcess, output: IO[bytes] | None, *streams: Any) -> None:
        self._process, self._output = process, output
        self.system = psutil.Process(process.pid)
        self._stop = weakref.finalize(self, _stop, process, self.system, (output, *streams), os.getpid())

    @property
    def pid(self) -> int:
        """Process id."""
        return self.system.pid

    def kill(self) -> None:
        """Kill it and all that it started, without closing anything, which another thread may be using."""
        end_tree(self.system)

    def close(self) -> None:
        """End it, and all that it started. Closing twice is harmless."""
        self._stop()

    def ending(self, reason: Reason = Reason.ENDED, patience: float = 10.0) -> Ending:
        """Close it and say how it ended; one that is about to end by itself gets some seconds to do so."""
        until = time.monotonic() + (patience if reason is Reason.ENDED else 0.0)
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.005)
        self.kill()
        output = self._tail()
        self.close()
        code = self._process.returncode if isinstance(self._process, subprocess.Popen) else self._process.exitcode
        return Ending(reason, code or 0, output)

    def has_ended(self) -> bool:
        """Say whether nothing runs any more; it is not reaped, so that nobody else can have its id."""
        try:
            return not self.system.is_running() or self.system.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def forget_output(self) -> None:
        """Drop what it printed so far; it writes at the same offset, so what it prints next starts at 0."""
        if self._output is not None:
            self._output.seek(0)
            self._output.truncate()

    def _tail(self) -> str:
        if self._output is None or self._output.closed:
            return ""
        size = self._output.seek(0, os.SEEK_END)  # it may be the place where the process would go on, but that is dead
        self._output.seek(max(0, size - _TAIL_BYTES))
        return self._output.read().decode(errors="replace")


def _stop(
    process: subprocess.Popen[bytes] | BaseProcess, system: psutil.Process, streams: Iterable[Any], owner: int
) -> None:
    if os.getpid() != owner:  # a fork of this process does not own its children
        return
    end_tree(system)  # before it is reaped
    if isinstance(process, subprocess.Popen):
        process.wait()
    else:
        process.join()
    for stream in streams:
        if stream is not None:
            stream.close()


# --- a task -----------------------------------------------------------------------------------


class TaskProcess(Child):
    """A task in a process of its own; use it in a `with` block. See `start_task`.

    Attributes:
        connection: to the task.
        seconds: how long it runs.
        peak_bytes: most memory that it and what it started held together, looked at now and then.
    """

    def __init__(
        self,
        process: BaseProcess,
        output: IO[bytes] | None,
        connection: Connection,
        removal: ExitStack,
        limits: ProcessLimits,
        shared_bytes: int,
    ) -> None:
        super().__init__(process, output, connection, removal)  # the file is removed once it is closed
        self.connection = connection
        self.peak_bytes = 0
        self._limits, self._shared_bytes = limits, shared_bytes
        self._began, self._looked = time.monotonic(), -inf
        self._hung_up = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def news(self) -> tuple[list[Any], Ending | None]:
        """Return what it sent since the last call, and how it ended, if it did; it is ended where it is beyond its limits."""
        reason = self._reason_to_end()
        sent = []
        with suppress(EOFError, ConnectionResetError):
            while self.connection.poll():
                sent.append(self._received())
        return sent, None if reason is None else self.ending(reason)

    def _received(self) -> Any:
        self._hung_up = True
        message = self.connection.recv()
        self._hung_up = False
        return message

    def _reason_to_end(self) -> Reason | None:
        if self._hung_up or self.has_ended():
            return Reason.ENDED
        if self.seconds - self._looked >= _MEMORY_LOOK_SECONDS:
            self._looked, self.peak_bytes = self.seconds, max(self.peak_bytes, self._held_bytes())
        if self.peak_bytes > self._limits.memory_bytes:
            return Reason.MEMORY
        return Reason.OVERTIME if self.seconds > self._limits.seconds else None

    def _held_bytes(self) -> int:
        held = [_resident_bytes(process) for process in process_tree(self.system)]
        return max(0, sum(held[:1]) - self._shared_bytes) + sum(held[1:])

    def __enter__(self) -> TaskProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_task(
    task: Task,
    *,
    method: Literal["fork", "spawn"],
    limits: ProcessLimits = ProcessLimits(),
    shared_bytes: int = 0,
    keep_output: bool = True,
) -> TaskProcess:
    """Do a task in another process, in a group of its own, which ends when this one does.

    Args:
        task: is given the other end of the connection; an exception of its own is printed, and is exit code 1.
        method: `fork` has at once what this process has imported and loaded; `spawn` starts empty, and imports the task.
        limits: what it may take.
        shared_bytes: of its own memory, that do not count: those that a fork shares with this process.
        keep_output: keep what it prints for its `Ending`, instead of printing it here.
    """
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    output, path, removal = None, "", ExitStack()
    if keep_output:
        descriptor, path = tempfile.mkstemp(prefix="t2n-output-")
        output = os.fdopen(descriptor, "rb")
        removal.callback(Path(path).unlink, missing_ok=True)
    process = context.Process(target=_serve, args=(task, theirs, path, os.getpid()), daemon=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads: it has one of its own
            process.start()
    except BaseException:
        ours.close()
        if output is not None:
            output.close()
        removal.close()
        raise
    finally:
        theirs.close()
    return TaskProcess(process, output, ours, removal, limits, shared_bytes)


def wait_for_news(processes: Iterable[TaskProcess], seconds: float) -> None:
    """Sleep until one of them sends something or ends, or it is time to look at their limits."""
    wait([process.connection for process in processes], timeout=seconds)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it is gone
        return 0


# --- in the other process ---------------------------------------------------------------------


def _serve(task: Task, connection: Connection, output: str, parent: int) -> None:
    """Do the task and leave; never returns to what this process was a fork of."""
    code = 1
    try:
        multiprocessing.current_process().daemon = False  # it may start processes of its own
        if sys.platform != "win32":
            os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches whoever started us, who decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if output:
            _redirect(output)
        threading.Thread(target=_leave_with_parent, args=(parent,), daemon=True).start()
        task(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is cleaned up here


def _redirect(path: str) -> None:
    """Let everything that is printed from now on go to a file, and nothing be read."""
    faulthandler.disable()  # it knows only the parent's files
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    with suppress(OSError):  # Windows removes no open file; there the parent does it later
        os.unlink(path)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Whatever stood for them in the process that was forked stays there.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace")
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )


def _leave_with_parent(parent: int) -> None:
    """End with whoever started us. Not PR_SET_PDEATHSIG: that follows the parent's *thread*, and ends nothing that we started."""
    if sys.platform == "win32":
        with suppress(psutil.NoSuchProcess):
            psutil.Process(parent).wait()
    else:
        while os.getppid() == parent:
            time.sleep(0.2)
    for process in psutil.Process().children():
        end_tree(process)
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


__all__ = [
    "Child",
    "Ending",
    "ProcessLimits",
    "Reason",
    "Task",
    "TaskProcess",
    "end_tree",
    "process_tree",
    "start_task",
    "wait_for_news",
]

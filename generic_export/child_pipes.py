"""Programs that answer through pipes: whole messages are written and read, and a child that takes too long is killed.

In: a command. Out: `Child` and `ChildPipes`, or `JsonProgram` where each message is a line of JSON. POSIX can wait for a pipe
until a deadline. Windows cannot: there reads and writes block, and a timer that kills the child ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from math import inf
from typing import IO, Any, cast

from generic_export.errors import EngineError
from generic_export.processes import Child, Ending, end_tree

if sys.platform == "linux":
    import fcntl

_READ_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20


class OverdueError(Exception):
    """The child did not answer in time, and was killed."""


class ChildEndedError(Exception):
    """The child ended, or answered something that is no message.

    Attributes:
        ending: how it ended.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.cause)
        self.ending = ending


def start_program(
    command: Sequence[str], environment: Mapping[str, str], *, keep_output: bool = True
) -> tuple[Child, ChildPipes]:
    """Start a program with pipes to its standard input and output.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        keep_output: keep what it prints to standard error for its `Ending`; False drops it.
    """
    printed = tempfile.TemporaryFile(prefix="t2n-stderr-") if keep_output else None  # noqa: SIM115 - lives as long as the child
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if printed is None else printed,
        env=dict(environment),
        bufsize=0,
    )
    child = Child(process, printed, process.stdin, process.stdout)
    return child, ChildPipes(child, process.stdin, process.stdout)


class JsonProgram:
    """A program that answers each line of JSON with one. See `start_program` for the arguments."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, keep_output: bool = True) -> None:
        self._child, self._pipes = start_program(command, environment, keep_output=keep_output)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def exchange(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send a request and return the reply; when that fails, the program is ended.

        Raises:
            OverdueError: there was no reply in time.
            ChildEndedError: the program ended.
            ValueError: the reply is no JSON.
        """
        try:
            with self._pipes.within(seconds):
                self._pipes.write(memoryview(json.dumps(request, default=str).encode() + b"\n"))
                return json.loads(self._pipes.read_line())
        except EOFError:
            raise ChildEndedError(self._child.ending()) from None
        except BaseException:  # Ctrl-C, too: the exchange is cut in the middle
            self.close()
            raise

    def close(self) -> None:
        """End the program. Closing twice is harmless."""
        self._child.close()


class ChildPipes:
    """Standard input and output of a child process, both unbuffered.

    Args:
        child: killed when a deadline passes.
        stdin, stdout: as `subprocess.Popen` with `PIPE` and `bufsize=0` makes them.

    Raises:
        EngineError: the child was started without pipes.
    """

    def __init__(self, child: Child, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        if stdin is None or stdout is None:
            raise EngineError("the child process has no pipe.")
        self._child, self._stdin, self._stdout = child, cast(FileIO, stdin), cast(FileIO, stdout)
        self._deadline = inf
        self._unread = b""
        for pipe in (self._stdin, self._stdout):
            _prepare(pipe)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Kill the child if the block takes longer.

        Raises:
            OverdueError: it did.
        """
        self._deadline = time.monotonic() + seconds
        with _killing_later(self._child, seconds) if sys.platform == "win32" else contextlib.nullcontext():
            try:
                yield
            except EOFError:
                if time.monotonic() >= self._deadline:  # the timer ended it
                    raise OverdueError from None
                raise
            except OverdueError:
                self._child.kill()
                raise

    def write(self, view: memoryview) -> None:
        """Write all of a view.

        Raises:
            EOFError: the child is gone.
            OverdueError: it did not read in time.
        """
        while view:
            self._wait(self._stdin, writing=True)
            try:
                count = self._stdin.write(view) or 0
            except OSError as error:  # EPIPE; on Windows EINVAL
                raise EOFError(str(error)) from error
            view = view[count:]

    def fill(self, view: memoryview) -> None:
        """Fill all of a view.

        Raises:
            EOFError: the child is gone.
            OverdueError: it did not write in time.
        """
        while view:
            self._wait(self._stdout)
            count = self._stdout.readinto(view)
            if count == 0:
                raise EOFError
            view = view[count or 0 :]

    def read_line(self) -> bytes:
        """Read up to the next newline, and return what stands before it.

        Raises:
            EOFError: the child is gone.
            OverdueError: it did not write in time.
        """
        while b"\n" not in self._unread:
            self._wait(self._stdout)
            arrived = self._stdout.read(_READ_BYTES)
            if arrived == b"":
                raise EOFError
            self._unread += arrived or b""
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _wait(self, pipe: FileIO, writing: bool = False) -> None:
        """Wait until a pipe can be read or written."""
        if sys.platform == "win32":  # the operation itself waits
            return
        poller = select.poll()
        poller.register(pipe, select.POLLOUT if writing else select.POLLIN)
        remaining = self._deadline - time.monotonic()
        if remaining <= 0 or not poller.poll(None if remaining == inf else remaining * 1000):
            raise OverdueError


@contextlib.contextmanager
def _killing_later(child: Child, seconds: float) -> Iterator[None]:
    # The timer refers to the process alone: a child that nobody needs any more must not wait for the timer's thread to end.
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end_tree, (child.system,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _prepare(pipe: FileIO) -> None:
    """Let operations of a pipe return instead of waiting, and let it hold more before its writer has to wait."""
    if sys.platform != "win32":
        os.set_blocking(pipe.fileno(), False)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the user's pipe quota is used up; the default size is only slower
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


__all__ = ["ChildEndedError", "ChildPipes", "JsonProgram", "OverdueError", "start_program"]

"""The pipes to a child process: whole messages are written and read, and a child that takes too long is killed.

In: a running `Child` and its two pipes. Out: `ChildPipes`. POSIX can wait for a pipe until a deadline. Windows cannot: there reads
and writes block, and a timer that kills the child ends them.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from io import FileIO
from math import inf
from typing import IO, cast

from generic_export.errors import EngineError
from generic_export.processes import Child, end_tree

if sys.platform == "linux":
    import fcntl

_READ_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20


class OverdueError(Exception):
    """The child did not answer in time, and was killed."""


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


__all__ = ["ChildPipes", "OverdueError"]

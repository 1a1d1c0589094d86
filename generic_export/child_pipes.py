"""The pipes to a child process: whole messages are written and read, and a child that takes too long is killed.

In: a running `Child` and its two pipes. Out: `ChildPipes`. A blocking read is used on every system, since Windows can wait for no
pipe; what ends it in time is a timer that kills the child.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from io import FileIO
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
        self._child, self._stdin, self._stdout = child, stdin, cast(FileIO, stdout)
        self._unread = b""
        for pipe in (stdin, stdout):
            _enlarge(pipe)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Kill the child if the block takes longer.

        Raises:
            OverdueError: it did.
        """
        overdue, process = threading.Event(), self._child.system

        def end() -> (
            None
        ):  # refers to the process alone: a child that nobody needs any more must not wait for the timer's thread
            overdue.set()
            end_tree(process)

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except EOFError:
            if overdue.is_set():
                raise OverdueError from None
            raise
        finally:
            timer.cancel()
        if overdue.is_set():
            raise OverdueError

    def write(self, view: memoryview) -> None:
        """Write all of a view.

        Raises:
            EOFError: the child is gone.
        """
        while view:
            try:
                count = self._stdin.write(view)
            except OSError as error:  # EPIPE; on Windows EINVAL
                raise EOFError(str(error)) from error
            view = view[count:]

    def fill(self, view: memoryview) -> None:
        """Fill all of a view.

        Raises:
            EOFError: the child is gone.
        """
        while view:
            try:
                count = self._stdout.readinto(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError
            view = view[count:]

    def read_line(self) -> bytes:
        """Read up to the next newline, and return what stands before it.

        Raises:
            EOFError: the child is gone.
        """
        while b"\n" not in self._unread:
            try:
                arrived = self._stdout.read(_READ_BYTES)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not arrived:
                raise EOFError
            self._unread += arrived
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _enlarge(pipe: IO[bytes]) -> None:
    """Let a pipe hold more before its writer has to wait, where the system can."""
    if sys.platform == "linux" and hasattr(fcntl, "F_SETPIPE_SZ"):  # Python 3.10 names it
        with contextlib.suppress(OSError):  # the user's pipe quota is used up; the default size is only slower
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


__all__ = ["ChildPipes", "OverdueError"]

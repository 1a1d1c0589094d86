"""What a user types in a chat: lines, commands, Ctrl-C, the end of input.

In: the terminal, or a pipe whose lines are turns. Out: turns; and whether the answer that is being made is to stop.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from generic_export.errors import OptionError
from generic_export.interrupts import Interrupted

_PROMPT = "> "
_ONE_PRESS_SECONDS = 0.5  # a press that comes so soon after another is the same one


class _LineLeftError(Exception):
    """Ctrl-C while a line was typed."""


class PipedTurns:
    """Lines of a pipe or a file are turns; Ctrl-C ends the command as any other."""

    interactive = False

    def __enter__(self) -> PipedTurns:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stopped(self) -> bool:
        """Say whether the answer is to stop: it is not."""
        return False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Make an answer in this block."""
        yield

    def lines(self) -> Iterator[str]:
        """Yield what is said, turn after turn.

        Raises:
            OptionError: the input is no UTF-8.
        """
        try:
            for line in sys.stdin:
                line.encode("utf-8")  # what cannot be decoded may come as half characters
                if line.strip():
                    yield line.rstrip("\r\n")
        except UnicodeError as error:
            raise OptionError(f"the input is not UTF-8: {error}.", "Convert it first.") from error


class TypedTurns:
    """Lines typed in a terminal, edited with Python's readline where there is one.

    Ctrl-C stops an answer; on a line that holds something it drops the line; on an empty line, after another one, it leaves. So
    does the end of input (Ctrl-D).
    """

    interactive = True

    def __init__(self, say: Callable[[str], None]) -> None:
        """Describe it.

        Args:
            say: tells the user what Ctrl-C did.
        """
        self._say = say
        self._answering = self._reading = self._stopped = False
        self._pressed = -_ONE_PRESS_SECONDS
        self._dropped = self._leaves_next = False
        self._before: Any = None
        self._readline = _readline()

    def __enter__(self) -> TypedTurns:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def stopped(self) -> bool:
        """Say whether the answer is to stop."""
        return self._stopped

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Make an answer in this block: Ctrl-C there sets `stopped`, and a second one ends the command."""
        self._stopped, self._answering = False, True
        try:
            yield
        finally:
            self._answering = False
            self._leaves_next = self._stopped

    def lines(self) -> Iterator[str]:
        """Yield what is said, turn after turn."""
        while True:
            try:
                line = self._read()
            except _LineLeftError:
                if self._leaves():
                    return
                continue
            except EOFError:
                self._say("")
                return
            self._leaves_next = False
            if line.strip():
                yield line

    def _read(self) -> str:
        self._reading = True
        try:
            return input(_PROMPT)
        finally:
            self._reading = False

    def _leaves(self) -> bool:
        """Say whether Ctrl-C on this line leaves: the line is empty, and it was not the first press."""
        self._say("")
        if self._dropped:
            self._leaves_next = False
            return False
        if not self._leaves_next:
            self._say("Press Ctrl-C again to leave; /help lists the commands.")
        leaves, self._leaves_next = self._leaves_next, True
        return leaves

    def _press(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        again = time.monotonic() - self._pressed < _ONE_PRESS_SECONDS
        self._pressed = time.monotonic()
        if again:
            return
        if self._answering:
            if self._stopped:  # it was asked to stop and does not
                raise Interrupted
            self._stopped = True
        elif self._reading:
            self._dropped = bool(self._readline and self._readline.get_line_buffer())
            raise _LineLeftError


def _readline() -> Any:
    """Return Python's line editor; None where it was built without."""
    try:
        import readline
    except ImportError:
        return None
    return readline


__all__ = ["PipedTurns", "TypedTurns"]

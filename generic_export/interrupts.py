"""Ctrl-C that cannot get lost: the handler raises, and remembers; loops ask whether it was raised where nobody heard it.

In: signals. Out: `Interrupted`. Python drops an exception that is raised in a finaliser or the callback of a weak reference, and a
signal can arrive there as well as anywhere; so what works long calls `raise_if_interrupted` in each turn.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")
_ONE_PRESS_SECONDS = 0.5  # a terminal, a supervisor and a shell may all pass the same press on


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt: typer would end that one silently, with an exit code of its own.

    Attributes:
        left: what earlier work left behind, where somebody looked.
    """

    left: str | None = None


class InterruptHandler:
    """Handles a signal: the first raises `Interrupted`, another one after a moment ends the process at once.

    Attributes:
        interrupted: whether there was one.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._since = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Take a signal."""
        del frame
        if not self.interrupted:
            self.interrupted, self._since = True, time.monotonic()
            raise Interrupted
        if time.monotonic() - self._since > _ONE_PRESS_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into `Interrupted`, unless they are ignored (a background job, nohup)."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    heard = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    handler = InterruptHandler()
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in heard.items():
            signal.signal(number, before)


def raise_if_interrupted() -> None:
    """Ask for an interrupt that was raised where nobody heard it; in any thread.

    Raises:
        Interrupted: there was one.
    """
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, InterruptHandler) and handler.interrupted:
            raise Interrupted


def asking(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, and ask before each; raises as `raise_if_interrupted`."""
    for item in items:
        raise_if_interrupted()
        yield item


# Ctrl-C during a search: noted when it comes, raised where the search asks for it.
# In: a block of work. Out: a function for its loop to call. Raised at once it would be lost at times: what a signal
# handler raises inside a finaliser or a weak reference's callback is printed and forgotten (Python's data model,
# `object.__del__`).
@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` when a signal that raises it came since the block began.

    A second one is raised at once. Signals with another handler are left alone; in
    other threads than the main one there are none.
    """
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            signal.default_int_handler(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    numbers = _raising() if threading.current_thread() is threading.main_thread() else ()
    previous: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield check
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _raising() -> list[int]:
    every = (signal.SIGINT, signal.SIGTERM)
    return [number for number in every if signal.getsignal(number) is signal.default_int_handler]


__all__ = [
    "SIGNALS",
    "InterruptHandler",
    "Interrupted",
    "asking",
    "interruptible",
    "kept_interrupts",
    "raise_if_interrupted",
]

"""Ctrl-C during a search: noted when it comes, raised where the search asks for it.

In: a block of work. Out: a function for its loop to call. Raised at once it would be lost at times: what a signal handler raises
inside a finaliser or a weak reference's callback is printed and forgotten (Python's data model, `object.__del__`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` when a signal that raises it came since the block began.

    A second one is raised at once: whoever sends it does not want to wait. Signals with another handler are left alone; in
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


__all__ = ["kept_interrupts"]

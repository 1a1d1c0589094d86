"""Calls that only look at a module, such as trying an activation to learn which one it is: no part of the model's run.

In: code that makes such calls inside `with aside()`. Out: what records or replays a model asks `is_aside()` and lets them pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ASIDE: ContextVar[bool] = ContextVar("aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Let the calls of modules in the block pass as if nobody watched."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


def is_aside() -> bool:
    """Say whether this code runs inside such a block."""
    return _ASIDE.get()


__all__ = ["aside", "is_aside"]

"""Calls that only look at a module, such as trying an activation to learn which one it is: no part of the model's run.

In: code that makes such calls inside `with untraced_calls()`. Out: `is_untraced()`, by which what records or replays a model passes
them over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNTRACED: ContextVar[bool] = ContextVar("untraced_calls", default=False)


@contextmanager
def untraced_calls() -> Iterator[None]:
    """Let the calls of modules in the block pass as if nobody watched."""
    token = _UNTRACED.set(True)
    try:
        yield
    finally:
        _UNTRACED.reset(token)


def is_untraced() -> bool:
    """Say whether this code runs inside such a block."""
    return _UNTRACED.get()


__all__ = ["is_untraced", "untraced_calls"]

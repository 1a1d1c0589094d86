"""glibc's malloc, told for the length of a block how to keep memory. Without glibc nothing happens.

In: limits. Out: a context manager; what was set before holds again after it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum


class Malloc(IntEnum):
    """Parameters of mallopt(3), by glibc's numbers."""

    TRIM_THRESHOLD = -1  # free bytes at the top of a heap from which they go back to the system
    MMAP_THRESHOLD = -3  # bytes from which a block is mapped on its own, and goes back when it is freed
    ARENA_MAX = -8  # heaps that threads share


# glibc answers no question about its parameters, and stops adjusting the thresholds once one is set. So a parameter goes back to
# what an outer block or the environment made it, else to where glibc's own adjustment of it ends (mallopt(3)). Of the heaps, 0
# is the default: as many as the processors allow. But glibc reads that number only once, when a thread first wants a heap
# beyond it (arena_get2 in malloc/arena.c): threads that share one heap in the block may go on to share it.
_ENVIRONMENT = {
    Malloc.TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", 64 << 20),
    Malloc.MMAP_THRESHOLD: ("MALLOC_MMAP_THRESHOLD_", 32 << 20),
    Malloc.ARENA_MAX: ("MALLOC_ARENA_MAX", 0),
}
_set: dict[Malloc, int] = {}  # by the blocks that run


@contextmanager
def malloc_settings(wanted: Mapping[Malloc, int]) -> Iterator[None]:
    """Set parameters of malloc in the block; after it they are what they were, and freed memory goes back to the system."""
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):  # not Linux, or not glibc
        yield
        return
    before = {parameter: _set.get(parameter, _outside(parameter)) for parameter in wanted}
    try:
        for parameter, value in wanted.items():
            _set[parameter] = value
            mallopt(parameter, value)
        yield
    finally:
        for parameter, value in before.items():
            _set[parameter] = value
            mallopt(parameter, value)
        malloc_trim(ctypes.c_size_t(0))


def return_freed_memory() -> None:
    """Give the memory that was freed back to the system, before work that needs much of it."""
    with malloc_settings({}):
        pass


def _outside(parameter: Malloc) -> int:
    name, default = _ENVIRONMENT[parameter]
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


__all__ = ["Malloc", "malloc_settings", "return_freed_memory"]

"""Python's garbage collector while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Free no reference cycles in the block, or in the function that it decorates.

    A capture makes so many objects that the collector looks at all of PyTorch's several times: a sixth of the time of an export,
    for 40 MB. Objects without cycles, tensors among them, are freed as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = ["collection_paused"]

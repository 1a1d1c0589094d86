"""Journals: what a run has finished, a line of JSON for each item, so that a later run does not do it again.

In: a file that is open for appending, and finished items. Out: the items that a file holds. A run may be killed at any time: a
line that is damaged or cut short, and all after it, count for nothing and are cut off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append_item(descriptor: int, item: Any) -> None:
    """Append an item to a journal.

    Args:
        descriptor: of the file.
        item: plain data.

    Raises:
        OSError: the disk is full.
    """
    line = json.dumps(item).encode() + b"\n"
    if os.write(descriptor, line) != len(line):
        raise OSError(28, os.strerror(28))  # ENOSPC: a line fits or does not


def read_items(path: Path) -> tuple[list[Any], list[int]]:
    """Return the items of a journal, and for each the length of the file up to its end; none where it cannot be read."""
    items: list[Any] = []
    ends: list[int] = []
    try:
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            items.append(json.loads(line))
            ends.append(len(line) + (ends[-1] if ends else 0))
    except (OSError, ValueError):
        pass
    return items, ends


__all__ = ["append_item", "read_items"]

"""Sizes in bytes as a user writes them (on a command line, in a recipe, in a call), and figures as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

from generic_export.errors import OptionError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MOST_DIGITS = 100
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str | float, *, positive: bool = False) -> int:
    """Return a size in bytes: a number, with or without a unit (`8g`, `900MB`, `1.5 GiB`), in capitals or not.

    Args:
        text: what the user wrote; a number is taken as bytes.
        positive: refuse 0, too.

    Raises:
        OptionError: it is no such size.
    """
    written = "" if isinstance(text, bool) else _written(text)
    found = _SIZE.fullmatch(written) if len(written) <= _MOST_DIGITS else None
    size = int(Fraction(found[1]) * _UNITS[(found[2] or "").lower()]) if found else -1
    if size < positive:
        shown = _written(text)[:40]
        raise OptionError(
            f"{shown!r} is no size.", "Write a number and a unit, such as 8GB, 1.5GiB or 900MB, or a number of bytes."
        )
    return size


def _written(text: str | float) -> str:
    """Return what was written; a number that Python does not print is none."""
    try:
        return str(text)
    except ValueError:
        return ""


# Figures as people read them, on a terminal and on a page.
def size_text(size: float) -> str:
    """Return bytes as people read them: 980 B, 12.3 kB, 269.5 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a time as people read it: 41 ms, 3.9 s, 2 min 5 s."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"

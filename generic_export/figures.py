"""Figures as people read them, on a terminal and on a page."""

from __future__ import annotations


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


__all__ = ["seconds_text", "size_text"]

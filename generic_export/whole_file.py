"""A file of text that is there whole, or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write a file of UTF-8 beside its place, then put it there; an earlier one stays until then.

    Raises:
        OSError: it cannot be written there.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


__all__ = ["write_whole"]

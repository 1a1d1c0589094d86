"""What a system lacks, for tests that need it. In a process of `tests/like_windows` that is what Windows lacks."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

WINDOWS = sys.platform == "win32" or "like_windows" in os.environ.get("PYTHONPATH", "")


def _can_link() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            Path(folder, "link").symlink_to("nothing")
        except OSError:
            return False
    return True


needs_posix = pytest.mark.skipif(WINDOWS, reason="it does what only POSIX can")
needs_terminal = pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="it types into a pseudo terminal, and looks into Linux's /proc for who reads",
)
needs_links = pytest.mark.skipif(not _can_link(), reason="links need a privilege here")

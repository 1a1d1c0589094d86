"""The line that stands before a table of docs/measurements: what made it, at which commit, on which machine, and when."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit that is measured, "unknown" outside of a repository; with `+` where files differ from it."""
    try:
        asked = [
            subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short=7", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return asked[0] + ("+" if asked[1] else "")


def processor() -> str:
    """Return the processor of this machine, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    vector = " with AVX-512" if any("avx512f" in line for line in lines) else ""
    return f"{named[0] if named else platform.machine()}{vector}, {os.cpu_count()} cores"


def source(words: list[str]) -> str:
    """Return the line.

    Args:
        words: of the command line, the script first.
    """
    command = shlex.join((f"scripts/{Path(words[0]).name}", *words[1:]))
    return f"Source: `{command}`; commit {commit()}, {processor()}, {date.today().isoformat()}."


def print_source() -> None:
    """Print the line of this run to stderr, where it is no part of a table or of JSON."""
    print(source(sys.argv), file=sys.stderr)

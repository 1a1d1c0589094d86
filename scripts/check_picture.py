#!/usr/bin/env python3
"""Draw what a terminal shows of an export's check: docs/check.svg, on the site's first page.

usage: scripts/check_picture.py [--source FOLDER] [--output FILE]
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PROJECT = Path(__file__).resolve().parents[1]
_COLUMNS = 92


def shown(command: list[str]) -> str:
    """Return what a command says, with colours; its progress goes where ours goes."""
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(_COLUMNS)}
    run = subprocess.run(
        [sys.executable, "-m", "t2n_llm.cli.app", *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **colours},
        check=True,
    )
    return run.stdout


def main() -> None:
    """Export into a temporary folder and draw the terminal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, default=PROJECT / "examples" / "models" / "tiny-llama-real")
    parser.add_argument("--output", type=Path, default=PROJECT / "docs" / "check.svg")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = shown(["export", str(wanted.source), "--output", f"{folder}/{wanted.source.name}", "--dtype", "f16"])
    text = text.replace(f"{folder}/", "")  # as if it had been made here
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ t2n-llm export {wanted.source.name} --dtype f16", "bold"))
    console.print(Text.from_ansi(text.rstrip()), end="\n\n")  # the picture cuts into its last line
    console.save_svg(str(wanted.output), title="t2n-llm")
    print(wanted.output)


if __name__ == "__main__":
    main()

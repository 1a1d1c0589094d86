#!/usr/bin/env python3
"""Record what a terminal shows, with its times: docs/export.cast or docs/images.cast, which `asciinema play` shows.

usage: scripts/record_terminal.py [--source FOLDER] [--output FILE] [-- OPTION ...]
       scripts/record_terminal.py --images [--output FILE]

An export runs in a terminal of 100 columns, in a temporary folder where the model lies under its own name, so that no path of
this machine is shown. What follows -- are options of the export. --images records `generate` and `serve` with a photo (a sample of
matplotlib) and a tiny random LLaVA, whose words mean nothing. Linux and macOS. Format: asciicast 2.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))
_COLUMNS, _ROWS = 100, 30
_READ_BYTES = 65536
_STYLED = re.compile(r"(\x1b\[[0-9;]+m)((?:(?!\x1b).)+)\x1b\[0m\1")  # a style that ends where it begins again


def record(command: Sequence[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal and yield what it prints, with the seconds since its start.

    Raises:
        subprocess.CalledProcessError: it ended with another exit code than 0.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": str(_COLUMNS), "LINES": str(_ROWS)}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH", ""))))
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := _read(ours):
        if text := decoder.decode(data):
            yield time.monotonic() - began, text
    os.close(ours)
    if code := process.wait():
        raise subprocess.CalledProcessError(code, command)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, _READ_BYTES)
    except OSError:  # Linux's way to say that the other side was closed
        return b""


def without_repeats(text: str) -> str:
    """Return output with each style said once for all neighbors that share it: bars repeat theirs for each column."""
    while (shorter := _STYLED.sub(r"\1\2", text)) != text:
        text = shorter
    return text


def cast(title: str, events: Sequence[tuple[float, str]]) -> str:
    """Return a recording as asciicast 2: a line of JSON for the terminal, and one for each piece of output."""
    head = {"version": 2, "width": _COLUMNS, "height": _ROWS, "title": title}
    lines = [
        json.dumps(head),
        *(json.dumps([round(moment, 3), "o", without_repeats(text)], ensure_ascii=False) for moment, text in events),
    ]
    return "\n".join(lines) + "\n"


_ASK = """import base64
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=20)
photo = "data:image/jpeg;base64," + base64.b64encode(open("photo.jpg", "rb").read()).decode()
content = [{"type": "image_url", "image_url": {"url": photo}}, {"type": "text", "text": "w20 w21"}]
messages = [{"role": "user", "content": content}]
answer = client.chat.completions.create(model="tiny-llava", messages=messages, max_tokens=12)
print(answer.choices[0].message.content)
"""
_COMMANDS = (
    't2n-llm generate tiny-llava "w20 w21" --image photo.jpg --max-new-tokens 12 --greedy',
    "t2n-llm serve tiny-llava &",
    "cat ask.py",
    "python ask.py",
    "kill -INT %1; wait",
)


def _images(folder: Path) -> list[tuple[float, str]]:
    """Return the recording of a photo that is described, and sent to the server with OpenAI's client."""
    from matplotlib.cbook import get_sample_data

    from tests.t2n_llm.runtime.multimodal_models import export_llava

    export_llava(folder / "made")
    (folder / "made" / "export").rename(folder / "tiny-llava")
    photo = Path(get_sample_data("grace_hopper.jpg", asfileobj=False))
    (folder / "photo.jpg").write_bytes(photo.read_bytes())
    (folder / "ask.py").write_text(_ASK)
    python = shlex.quote(sys.executable)
    lines = [f't2n-llm() {{ {python} -m t2n_llm.cli.app "$@"; }}', f'python() {{ {python} "$@"; }}', "set -m"]
    for command in _COMMANDS:
        lines += [f"printf '$ %s\\n' {shlex.quote(command)}", command]
    return list(record(["bash", "-c", "\n".join(lines)], folder))


def main() -> None:
    """Run commands in a terminal and write the recording."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--source", type=Path, default=PROJECT / "examples" / "models" / "tiny-llama-real")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("options", nargs="*", help="options of the export")
    wanted = parser.parse_args()
    output = wanted.output or PROJECT / "docs" / ("images.cast" if wanted.images else "export.cast")
    if wanted.images:
        with tempfile.TemporaryDirectory() as folder:
            output.write_text(cast(_COMMANDS[0], _images(Path(folder))), encoding="utf-8")
        print(output)
        return
    name = wanted.source.resolve().name
    words = ["export", name, "--output", "exported", *wanted.options]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).symlink_to(wanted.source.resolve())
        events = list(record([sys.executable, "-m", "t2n_llm.cli.app", *words], Path(folder)))
    shown = f"t2n-llm {' '.join(words)}"
    output.write_text(cast(shown, [(0.0, f"$ {shown}\r\n"), *events]), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()

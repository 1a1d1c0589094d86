"""scripts/record_terminal.py: the recording in docs/, and one of a short command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.load_script import load_script
from tests.systems import needs_posix

pytestmark = needs_posix
RECORDING = Path(__file__).resolve().parents[2] / "docs" / "export.cast"


def test_the_recorded_export_is_never_silent() -> None:
    """The first line within a second, something every second, each stage by name, and no path of a machine."""
    head, *events = map(json.loads, RECORDING.read_text(encoding="utf-8").splitlines())
    assert head["version"] == 2 and head["width"] == 100
    moments = [moment for moment, kind, _ in events]
    assert all(kind == "o" for _, kind, _ in events) and moments == sorted(moments)
    assert max(after - before for before, after in pairwise(moments)) < 1.0
    shown = "".join(text for _, _, text in events)
    for stage in ("Loading PyTorch", "Reading tiny-llama-real", "Capturing", "Running PyTorch", "Checking in tract"):
        assert stage in shown
    assert not re.search(r"/(tmp|home|root|work|Users)/", shown)
    assert RECORDING.stat().st_size < 64 << 10


def test_a_command_is_recorded_as_a_terminal_shows_it(tmp_path: Path) -> None:
    script = load_script("record_terminal")
    code = "import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns, 'é')"
    events = list(script.record([sys.executable, "-c", code], tmp_path))
    assert "".join(text for _, text in events) == "True 100 é\r\n"
    head, *pieces = map(json.loads, script.cast("a", events).splitlines())
    assert head["title"] == "a" and "".join(text for _, _, text in pieces) == "True 100 é\r\n"
    assert (
        script.without_repeats("\x1b[31ma\x1b[0m\x1b[31mb\x1b[0m\x1b[32mc\x1b[0m")
        == "\x1b[31mab\x1b[0m\x1b[32mc\x1b[0m"
    )
    with pytest.raises(subprocess.CalledProcessError):
        list(script.record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path))

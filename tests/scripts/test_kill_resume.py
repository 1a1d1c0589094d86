"""Exports that are killed at random moments, a few of them; `scripts/kill_resume.py` does twenty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_resume.py"
ROUNDS = int(os.environ.get("T2N_KILL_ROUNDS", "3"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.nightly
def test_killed_exports_are_resumed_byte_for_byte(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", str(ROUNDS), "--megabytes", "40", "--work", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200 * ROUNDS, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("identical") == ROUNDS
    assert list(tmp_path.iterdir()) == []

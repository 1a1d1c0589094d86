"""scripts/bench_calibration.py on a tiny shape: every row is measured, and says what it is relative to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_calibration.py"


@pytest.mark.nightly
def test_a_tiny_shape_is_calibrated(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--layers", "3", "--algorithms", "gptq,sensitivity"]
    done = subprocess.run(
        [*command, "--texts", "2", "--work", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # beside other tests, two threads wait for each other
    )
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["forward", "gptq", "sensitivity"]
    assert all(row[1].endswith(" s") for row in rows)
    assert not list(tmp_path.iterdir())

"""scripts/table_source.py: the line before a table of measurements is one that tests/docs accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_measurements import _COMMAND, _DATE
from tests.load_script import load_script

table_source = load_script("table_source")


def test_the_line_names_script_commit_machine_and_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bench_load.py", "--size", "1B"])
    table_source.print_source()
    line = capsys.readouterr().err.strip()
    assert line.startswith("Source: `scripts/bench_load.py --size 1B`; commit ")
    assert _COMMAND.findall(line) == ["scripts/bench_load.py"] and _DATE.search(line)
    assert re.search(r"commit ([0-9a-f]{7,}\+?|unknown), \S", line) and line.endswith(".")


def test_outside_of_a_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table_source, "ROOT", tmp_path)
    assert table_source.commit() == "unknown"

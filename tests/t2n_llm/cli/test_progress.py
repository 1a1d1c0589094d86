"""What is shown while a command works: steps, and how long the rest takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from t2n_llm.cli import console
from t2n_llm.cli.console import Sink
from t2n_llm.reporter import LogReporter
from tests.t2n_llm.command_line import call


def test_the_check_of_an_export_shows_its_steps(
    tiny_export: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.0)
    done = call("validate", tiny_export, "--reference", tiny_llama, "--decode-steps", 6)
    assert done.code == 0
    stages = done.err.split("Running PyTorch")[1].split("Checking in tract: ")
    assert len(stages) == 5
    assert all("5/6, " in stages[place] and " s left" in stages[place] for place in (0, 3, 4))


def test_steps_without_a_terminal_are_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Sink() as sink:
        sink.stage("Counting")
        for step in range(64):
            sink.steps(step, 64)
    assert capsys.readouterr().err.count("\n") == 1
    LogReporter().steps(1, 2)


def test_what_a_command_waits_for_is_named_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Sink()
    sink.waiting("Loading")
    assert capsys.readouterr().err == ""
    sink._err._force_terminal = True
    sink.waiting("Loading")
    assert "Loading" in capsys.readouterr().err

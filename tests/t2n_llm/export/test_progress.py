"""Progress: a line now and then where there is no terminal, a bar on one, nothing in the other modes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from generic_export.write.archive import WriteProgress
from t2n_llm.cli import console
from t2n_llm.cli.console import OutputMode, Sink


def tell(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write 100 tensors of 1 GB in 100 seconds."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with sink:
        for done in range(101):
            sink.progress(WriteProgress(f"layer.{done}.dat", done * 10**9, 100 * 10**9, done, 100))
            now[0] += 1.0


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tell(Sink(OutputMode.HUMAN), monkeypatch)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 19  # every 5 seconds, not for every tensor, and not at the end
    assert "5.00 of 100.00 GB, 5 of 100 tensors, 1000 MB/s, 95 s left" in lines[0]


@pytest.mark.parametrize("mode", [OutputMode.QUIET, OutputMode.JSON])
def test_nothing_in_other_modes(
    mode: OutputMode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(Sink(mode), monkeypatch)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal() -> None:
    sink, screen = Sink(OutputMode.HUMAN), io.StringIO()
    sink._err = Console(file=screen, force_terminal=True, width=160)
    with sink:
        for done in (0, 1, 2):
            sink.progress(WriteProgress("layer.w.dat", done * 10**9, 4 * 10**9, done, 4))
        assert sink._progress is not None
        sink._progress.refresh()
    assert "layer.w" in screen.getvalue()
    assert "2/4 tensors" in screen.getvalue()
    assert "2.00/4.00 GB, 2/4 tensors" in screen.getvalue()

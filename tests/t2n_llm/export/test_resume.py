"""Exports that are continued: after Ctrl-C, after a kill, with another source, beside another export."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from generic_export.errors import DiskFullError
from generic_export.write.archive import WriteProgress
from t2n_llm.export.pipeline import export_llm
from t2n_llm.export.verify import verify_export
from t2n_llm.reporter import LogReporter
from tests.systems import needs_posix
from tests.t2n_llm.command_line import RunningCommand, fill, refused, small_disk

OPTIONS = {"check": False, "require_tokenizer": False, "archive": "tar"}


class Said(LogReporter):
    """Remembers what it is told; interrupts once so many tensors are written."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stages: list[str] = []
        self.warnings: list[str] = []
        self.stop_after = stop_after

    def stage(self, title: str) -> None:
        self.stages.append(title)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def progress(self, progress: WriteProgress) -> None:
        if self.stop_after is not None and progress.done_entries >= self.stop_after:
            raise KeyboardInterrupt


def interrupted(model: Path, target: Path, **options: object) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        export_llm(str(model), target, resume=True, reporter=Said(stop_after=4), **OPTIONS, **options)  # type: ignore[arg-type]
    assert caught.value.kept.parent == target.parent  # type: ignore[attr-defined]
    assert not target.exists()


def archive_bytes(folder: Path) -> bytes:
    return (folder / "model.nnef.tar").read_bytes()


def test_an_interrupted_export_is_continued(model: Path, parent: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    first = "model.embed_tokens.weight"
    tensors[first][0, 0] = 1e6  # counted when it is cast, and not forgotten when it is not cast again
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    export_llm(str(model), parent / "whole", reporter=Said(), **OPTIONS)  # type: ignore[arg-type]
    interrupted(model, parent / "x")
    said = Said()
    result = export_llm(str(model), parent / "x", resume=True, reporter=said, **OPTIONS)  # type: ignore[arg-type]
    assert any(title.startswith("Continuing") for title in said.stages)
    assert archive_bytes(parent / "x") == archive_bytes(parent / "whole")
    assert result.manifest["f16_overflows"] == {first: {"count": 1, "max_abs": 1e6}}
    assert sorted(path.name for path in parent.iterdir()) == ["whole", "x"]
    assert sorted(path.name for path in (parent / "x").iterdir()) == sorted(
        path.name for path in (parent / "whole").iterdir()
    )


def test_a_changed_source_or_option_starts_again_and_says_so(model: Path, parent: Path) -> None:
    interrupted(model, parent / "x")
    file = model / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))
    said = Said(stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        export_llm(str(model), parent / "x", resume=True, reporter=said, **OPTIONS)  # type: ignore[arg-type]
    assert "other weights" in said.warnings[0]
    said = Said()
    export_llm(str(model), parent / "x", resume=True, dtype="f32", reporter=said, **OPTIONS)  # type: ignore[arg-type]
    assert "other weights" in said.warnings[0]
    assert json.loads((parent / "x" / "export.json").read_text())["options"]["dtype"] == "f32"
    assert os.listdir(parent) == ["x"]


def test_a_fresh_export_removes_what_was_left(model: Path, parent: Path) -> None:
    interrupted(model, parent / "x")
    assert len(os.listdir(parent)) == 2  # the partial, and the file that says whose it is
    export_llm(str(model), parent / "x", reporter=Said(), **OPTIONS)  # type: ignore[arg-type]
    assert os.listdir(parent) == ["x"]


def test_an_interrupted_tgz_leaves_nothing_and_starts_again(tiny_llama: Path, parent: Path) -> None:
    options = OPTIONS | {"archive": "tgz", "resume": True}
    with pytest.raises(KeyboardInterrupt) as caught:
        export_llm(str(tiny_llama), parent / "x", reporter=Said(stop_after=4), **options)  # type: ignore[arg-type]
    assert not hasattr(caught.value, "kept")
    assert list(parent.iterdir()) == []
    said = Said()
    export_llm(str(tiny_llama), parent / "x", reporter=said, **options)  # type: ignore[arg-type]
    assert "a .tgz is one compressed stream and cannot be continued" in said.warnings[0]
    assert verify_export(parent / "x").passed and os.listdir(parent) == ["x"]


def test_two_exports_at_once(large_model: Path, parent: Path) -> None:
    """The second neither touches nor waits for the first; who is ready first gets the name."""
    arguments = ("export", large_model, "-o", parent / "x", "--no-tokenizer", "--no-check", "--archive", "dir")
    first, second = RunningCommand(*arguments), RunningCommand(*arguments, "--resume")
    outcomes = [first.end(), second.end()]
    assert sorted(outcome.code for outcome in outcomes) == [0, 2], outcomes
    refused(max(outcomes, key=lambda outcome: outcome.code), "exists")
    assert os.listdir(parent) == ["x"]
    assert verify_export(parent / "x").passed


@pytest.mark.parametrize("archive", ["dir", "tgz"])
def test_a_full_disk_leaves_nothing_even_with_resume(archive: str, tiny_llama: Path, parent: Path) -> None:
    class Fill(Said):
        def progress(self, progress: WriteProgress) -> None:
            if progress.done_entries > 2:
                fill(disk)  # type: ignore[arg-type]

    with small_disk(parent / "disk", "8m") as disk:
        if disk is None:
            pytest.skip("needs the right to mount a tmpfs")
        with pytest.raises(DiskFullError):
            export_llm(str(tiny_llama), disk / "x", resume=True, reporter=Fill(), **OPTIONS | {"archive": archive})  # type: ignore[arg-type]
        assert os.listdir(disk) == ["ballast"]


@needs_posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_that_it_kept_the_partial(number: int, large_model: Path, parent: Path) -> None:
    running = RunningCommand(
        *("export", large_model, "-o", parent / "x", "--no-tokenizer", "--no-check", "--archive", "dir", "--resume")
    )
    running.wait_for_stage("Writing")
    running.wait_until(lambda: any(parent.glob(".x.partial-*/.model.nnef.partial-*.journal")))
    running.press_ctrl_c() if number == signal.SIGINT else running.terminate()
    outcome = running.end()
    refused(outcome, "interrupted")
    assert "kept in" in outcome.line("hint")
    assert sorted(path.name[:10] for path in parent.iterdir()) == [".x.partial", ".x.partial"]

"""Wheels of other releases: fetched once, by one process, whole or not at all; without a network one clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import EngineMissingError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.__main__ import main
from generic_export.inference_target.tract.releases.wheels import (
    RECORD,
    cached_wheel,
    wheel_packages,
    wheels_dir,
)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "t2n-llm" / "wheels"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")


def test_the_installed_release_needs_no_folder() -> None:
    assert wheel_packages("0.23.9") is None


def test_a_pinned_version_is_fetched_by_the_export_that_needs_it(fresh_cache: Path, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.SiLU()), torch.randn(2, 3)
    try:
        export_model_to_nnef(model, x, tmp_path / "m.nnef", TractNNEF("0.22.4"))
    except EngineMissingError as error:
        pytest.skip(str(error))
    folder = cached_wheel("0.22.4")
    assert folder.parent == wheels_dir() == fresh_cache
    assert TractWheel(packages=folder).version == "0.22.4"
    record = json.loads((folder / RECORD).read_text())
    assert record["release"] == "0.22.4" and len(record["sha256"]) == 64 and record["file"].endswith(".whl")
    assert [path for path in fresh_cache.iterdir() if ".fetch-" in path.name] == []


@pytest.mark.usefixtures("offline")
def test_without_a_network_the_error_has_the_command_for_later(fresh_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError, match="pip cannot reach a package index") as refusal:
        export_model_to_nnef(nn.ReLU(), torch.randn(2), tmp_path / "m.nnef", TractNNEF("0.22.4"))
    command = "python -m generic_export.inference_target.tract.releases wheels 0.22.4"
    assert command in str(refusal.value)
    assert [path for path in fresh_cache.iterdir() if path.is_dir()] == []
    run = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "") and "pip cannot reach a package index" in run.stderr


@pytest.mark.usefixtures("offline")
def test_what_lies_in_the_cache_is_not_fetched_again(fresh_cache: Path) -> None:
    folder = cached_wheel("0.22.4")
    folder.mkdir(parents=True)
    with pytest.raises(EngineMissingError):  # a folder without a record is what is left of something
        wheel_packages("0.22.4")
    (folder / RECORD).write_text("{}")
    assert wheel_packages("0.22.4") == folder
    with pytest.raises(EngineMissingError, match="it was not requested"):
        wheel_packages("0.22.3", fetch=False)


@pytest.mark.usefixtures("offline")
def test_what_a_killed_process_left_is_cleared_away(fresh_cache: Path) -> None:
    left = fresh_cache / f".{cached_wheel('0.22.4').name}.fetch-x"
    left.mkdir(parents=True)
    with pytest.raises(EngineMissingError):
        wheel_packages("0.22.4")
    assert not left.exists()


def test_two_processes_fetch_once(fresh_cache: Path) -> None:
    ask = "from generic_export.inference_target.tract.releases.wheels import wheel_packages as w; print(w('0.22.4'))"
    command = [sys.executable, "-W", "ignore", "-c", f"import logging; logging.basicConfig(level='INFO'); {ask}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    said = [process.communicate() for process in both]
    if any("EngineMissingError" in errors for _, errors in said):
        pytest.skip(said[0][1].splitlines()[-1])
    assert [answer.strip() for answer, _ in said] == [str(cached_wheel("0.22.4"))] * 2
    assert sum(errors.count("downloading the wheel") for _, errors in said) == 1


def test_a_release_that_never_was_has_other_advice(fresh_cache: Path) -> None:
    with pytest.raises(EngineMissingError, match=r"no wheel exists for|cannot reach a package index"):
        wheel_packages("0.22.999")


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["engines"]) == 2
    assert "{wheels,command}" in capsys.readouterr().err

"""What an export leaves where: nothing that others may read, nothing foreseeable, and no false word about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from generic_export.errors import ArchiveError, T2NError
from generic_export.files import write_whole
from generic_export.interrupts import Interrupted
from quant.imatrix import Imatrix, load_imatrix, save_imatrix
from quant.protocol import InputStatistics
from t2n_llm.cli.app import advice_on
from t2n_llm.export.failure_hint import find_stale_exports, report_stale_exports
from t2n_llm.export.pipeline import export_llm
from tests.t2n_llm.export.test_resume import OPTIONS, Said, interrupted


@pytest.mark.parametrize("archive", ["tar", "dir"])
@pytest.mark.parametrize(
    ("mode", "file", "folder"), [(0o600, 0o600, 0o700), (0o640, 0o640, 0o750), (0o644, 0o644, 0o755)]
)
def test_an_export_is_no_more_readable_than_its_source(
    mode: int, file: int, folder: int, archive: str, model: Path, parent: Path
) -> None:
    (model / "model.safetensors").chmod(mode)
    before = os.umask(0o022)
    try:
        export_llm(str(model), parent / "x", check=False, require_tokenizer=False, archive=archive)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (parent / "x").rglob("*") if path.is_file()}
    assert modes == {file}
    assert (parent / "x").stat().st_mode & 0o777 == folder


def test_nobody_can_put_something_under_the_name_of_a_partial(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    target = tmp_path / "a.imatrix.safetensors"
    for name in (f"{target.name}.partial", f".{target.name}.partial"):
        (tmp_path / name).symlink_to("mine")
    statistics = {"w": InputStatistics(torch.ones(4), 3)}
    save_imatrix(Imatrix(statistics), target)
    write_whole(tmp_path / "report", "text")
    assert (tmp_path / "mine").read_text() == "mine"
    assert load_imatrix(target).statistics["w"].tokens == 3
    assert len(os.listdir(tmp_path)) == 5  # no other partial


def test_what_an_earlier_run_left_is_named(tiny_llama: Path, parent: Path) -> None:
    interrupted(tiny_llama, parent / "x")
    assert len(find_stale_exports(parent / "x")) == 2

    class Stopped(Said):
        def stage(self, title: str) -> None:
            if title.startswith("Capturing"):
                raise Interrupted

    with pytest.raises(Interrupted) as caught:
        export_llm(str(tiny_llama), parent / "x", reporter=Stopped(), **OPTIONS)  # type: ignore[arg-type]
    hint = str(advice_on(caught.value).hint)
    assert "Nothing was left behind" not in hint
    assert "--resume" in hint and all(str(path) in hint for path in find_stale_exports(parent / "x"))
    with pytest.raises(T2NError) as error, report_stale_exports(parent / "x"):
        raise ArchiveError("x: bad.", "Nothing was left behind.")
    assert "Nothing was left behind" not in str(error.value) and "rm -r" in str(error.value.hint)


def test_where_nothing_is_left_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught, report_stale_exports(tmp_path / "x"):
        raise Interrupted
    assert advice_on(caught.value).hint == "Nothing was left behind."


def test_messages_are_one_line() -> None:
    error = T2NError("first\n  second\n\nthird", "do\nthis")
    assert (error.message, error.hint, str(error)) == ("first second third", "do this", "first second third do this")

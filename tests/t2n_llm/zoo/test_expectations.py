"""Expected failures: both kinds of surprise fail a run; the file is data that survives a round trip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export.errors import OptionError
from t2n_llm.zoo.expectations import (
    EXPECTED_FILE,
    Expected,
    read_expected,
    reason_of,
    surprises,
    updated,
    write_expected,
)
from t2n_llm.zoo.verdict import FAILED, NOT_RUNNABLE, OUTCOMES, RIGHT, WRONG, CellVerdict

ROW = Expected(FAILED, "capture", "aten.foo has no form")
PASS = CellVerdict("llama", "f32", RIGHT, "done")
FAIL = CellVerdict("llama", "f32", FAILED, "capture", error="CaptureError", message="no form")

texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1).filter(str.strip)
rows = st.dictionaries(texts, st.builds(Expected, st.sampled_from([o for o in OUTCOMES if o != RIGHT]), texts, texts))


@given(rows)
def test_rows_survive_the_file(rows: dict[str, Expected]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expected.toml"
        write_expected(rows, path)
        assert read_expected(path) == rows
        assert len([line for line in path.read_text().split("\n") if line and line[0] != "#"]) == len(rows)


def test_a_pass_that_was_not_expected_is_a_surprise() -> None:
    (surprise,) = surprises([PASS], {PASS.key: ROW})
    assert (surprise.key, surprise.kind) == ("llama:f32", "unexpected pass")
    assert ROW.reason in surprise.text


def test_a_failure_without_a_row_is_a_surprise() -> None:
    (surprise,) = surprises([FAIL], {"llama:f16": ROW})
    assert surprise.kind == "unexpected failure"
    assert "CaptureError: no form" in surprise.text


@pytest.mark.parametrize("outcome", [WRONG, NOT_RUNNABLE])
def test_another_failure_is_a_surprise(outcome: str) -> None:
    (surprise,) = surprises([replace(FAIL, outcome=outcome)], {FAIL.key: ROW})
    assert surprise.kind == "another failure"


def test_what_is_expected_is_none() -> None:
    assert surprises([FAIL, CellVerdict("opt", "f32", RIGHT, "done")], {FAIL.key: ROW}) == []
    assert surprises([replace(FAIL, stage="write", message="elsewhere")], {FAIL.key: ROW}) == []
    assert surprises([], {FAIL.key: ROW}) == []  # a cell that was not run is not judged


def test_what_f32_does_not_is_not_expected_of_other_element_types() -> None:
    half = replace(FAIL, dtype="f16")
    assert surprises([half], {FAIL.key: ROW}) == []
    assert surprises([replace(half, outcome=WRONG)], {FAIL.key: ROW})[0].kind == "another failure"
    assert surprises([replace(half, outcome=RIGHT)], {FAIL.key: ROW}) == []  # said of f32 alone
    assert surprises([half], {"qwen3:f32": ROW})[0].kind == "unexpected failure"


def test_a_row_of_an_architecture_that_is_gone_is_a_surprise() -> None:
    (surprise,) = surprises([], {"gone:f32": ROW, "llama:f32": ROW}, ["llama"])
    assert (surprise.key, surprise.kind) == ("gone:f32", "no such case")


def test_updating_keeps_what_a_person_wrote() -> None:
    opt = CellVerdict("opt", "f32", WRONG, "decode", error="FailedValidationError", message="max abs error 0.3")
    before = {FAIL.key: ROW, "opt:f32": ROW, "bloom:f32": ROW, "mpt:f32": ROW}
    after = updated([FAIL, opt, CellVerdict("bloom", "f32", RIGHT, "done")], before)
    assert after == {
        FAIL.key: ROW,
        "opt:f32": Expected(WRONG, "decode", "FailedValidationError: max abs error 0.3"),
        "mpt:f32": ROW,
    }
    assert surprises([FAIL, opt], after) == []


def test_reasons_are_one_short_line() -> None:
    reason = reason_of(CellVerdict("a", "f32", "crashed", "capture", log="one\n\x1b[31mlast words\x7f"))
    assert reason == "[31mlast words"
    assert reason_of(CellVerdict("a", "f32", "crashed", "x")) == "no message"
    assert len(reason_of(replace(FAIL, message="long " * 500))) <= 240


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        '"a:f32" = "failed"',
        '"a:f32" = { outcome = "failed", stage = "capture" }',
        '"a:f32" = { outcome = "failed", stage = "capture", reason = " " }',
        '"a:f32" = { outcome = "right", stage = "done", reason = "it works" }',
        '"a:f32" = { outcome = "unknown", reason = "x" }',
    ],
)
def test_a_malformed_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"expected\.toml"):
        read_expected(path)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_expected(tmp_path / "none.toml") == {}


def test_the_package_has_a_row_for_architectures_only() -> None:
    from t2n_llm.zoo.suites.registry import rows_of_all

    assert EXPECTED_FILE.exists()
    assert surprises([], read_expected(), rows_of_all()) == []

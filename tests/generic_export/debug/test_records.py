"""Diagnoses as data: to JSON and back, the faults named, a table for a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export.debug.diagnosis import Diagnosis, DiagnosisError
from generic_export.debug.records import (
    Axis,
    AxisReport,
    Comparison,
    ErrorRecord,
    Leaf,
    LeafKind,
    Outcome,
    Piece,
    Stage,
    Verdict,
)
from generic_export.diagnose import diagnosis_text
from generic_export.errors import ArchiveError


def piece(key: str, *children: str, parents: tuple[str, ...] = (), paths: tuple[str, ...] | None = None) -> Piece:
    leaf = Leaf("x", LeafKind.TENSOR, "float32", (2, 3), ("B", "3"))
    return Piece(
        key, key.title(), f"mod.{key.title()}", key, paths or (key,), 0, "model.py:3", (leaf,), (leaf,),
        children=children, parents=parents,
    )  # fmt: skip


def failed(key: str, stage: Stage = Stage.TRANSLATE, message: str = "no form", source: str = "") -> Verdict:
    error = ErrorRecord("UnsupportedOperatorError", message)
    return Verdict(key, key, Outcome.FAILED, stage, error=error, operator="aten.foo.default", source=source)


def diagnosis(*verdicts: Verdict, isolated: tuple[Verdict, ...] = ()) -> Diagnosis:
    pieces = (
        piece("root", "left", "right"),
        piece("left", "leaf", parents=("root",)),
        piece("right", parents=("root",), paths=("right", "other")),
        piece("leaf", parents=("left",)),
    )
    report = AxisReport((("B", (2, None)),), (Axis("x", 0, "B", (2, 5)),), ("a warning",))
    return Diagnosis(
        "Root", "tract 0.23.9", "failing", pieces, verdicts, isolated, report, ("never",), versions={"torch": "2"}
    )


def ok(key: str, *comparisons: Comparison) -> Verdict:
    return Verdict(key, key, Outcome.OK, Stage.COMPARE, metrics=comparisons, stage_seconds={"run": 0.5})


def test_the_smallest_failing_piece_is_the_culprit() -> None:
    found = diagnosis(failed("root"), failed("left"), ok("right"), failed("leaf", source="model.py:9")).culprits()
    assert [culprit.piece.key for culprit in found] == ["leaf"]
    assert found[0].source == "model.py:9"
    assert "model.py:9" in found[0].sentence
    assert not found[0].own_code


def test_a_parent_is_the_culprit_when_its_children_pass_and_it_fails_alone() -> None:
    alone = failed("root", source="model.py:4")
    (culprit,) = diagnosis(failed("root"), ok("left"), ok("right"), ok("leaf"), isolated=(alone,)).culprits()
    assert culprit.own_code
    assert culprit.verdict is alone


def test_equal_failures_are_one_fault() -> None:
    same = diagnosis(failed("root"), failed("left"), failed("right"), failed("leaf")).culprits()
    assert [[each.key for each in culprit.pieces] for culprit in same] == [["right", "leaf"]]
    other = diagnosis(failed("root"), failed("left"), failed("right", message="other"), failed("leaf")).culprits()
    assert len(other) == 2


def test_text_names_piece_fault_and_warning() -> None:
    text = diagnosis_text(diagnosis(failed("root"), failed("left"), ok("right"), failed("leaf", source="model.py:9")))
    for words in ("Root", "2 x Right", "leaf", "model.py:9", "aten.foo.default", "a warning", "never", "failed"):
        assert words in text


def test_raise_if_failed_says_which() -> None:
    diagnosis(ok("root"), ok("left"), ok("right"), ok("leaf")).raise_if_failed()
    with pytest.raises(DiagnosisError, match="Leaf"):
        diagnosis(failed("root"), failed("left"), ok("right"), failed("leaf")).raise_if_failed()


def test_ranking_has_the_largest_error_for_what_is_allowed_first() -> None:
    def metrics(error: float, allowed: float) -> Comparison:
        return Comparison("y", error <= allowed, error, error, (0,), 0.0, allowed=allowed)

    found = diagnosis(ok("root"), ok("left", metrics(1.0, 10.0)), ok("right", metrics(0.1, 0.05)), ok("leaf")).ranking()
    assert [item[0].key for item in found] == ["right", "left"]


@given(
    st.sampled_from(Outcome),
    st.none() | st.sampled_from(Stage),
    st.floats(allow_nan=False),
    st.text(),
    st.none() | st.floats(0, 1),
)
def test_json_round_trip(outcome: Outcome, stage: Stage | None, number: float, text: str, kl: float | None) -> None:
    found = Comparison("y", False, number, 0.5, (1, 2), 0.5, text, allowed=1e-5, kl_divergence=kl, set_index=1)
    verdict = Verdict(
        "root", text, outcome, stage, True, ErrorRecord("E", text, text), metrics=(found,), suggestions=(text,)
    )
    before = diagnosis(verdict, ok("left"), ok("right"), ok("leaf"), isolated=(verdict,))
    assert Diagnosis.from_json(before.to_json()) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 99}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ArchiveError):
        Diagnosis.from_json(text)

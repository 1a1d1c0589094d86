"""Learning that is stopped goes on where it was, and ends as it would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from generic_export.weights.values import read_tensor
from t2n_llm.compress import kept
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.calibrate import calibrate
from t2n_llm.compress.calibration import TextCalibration
from t2n_llm.compress.distil import Distilled, distil
from t2n_llm.compress.effort import Effort
from t2n_llm.compress.learning_journal import COURSE_NAME, WRITTEN_NAME, LearningJournal
from t2n_llm.compress.progress import DistilProgress, Progress, WritingProgress
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.compress.walk import open_walkable
from t2n_llm.source.hub import open_source
from tests.t2n_llm.compress.test_calibrate import is_linear, text_ids
from tests.trained_model import REAL_MODEL

IDS = text_ids("calib.txt", sequences=6, length=64)
EFFORT = Effort(passes=32)
TABLE = ("model.embed_tokens.weight", "lm_head.weight")


class _StoppedError(Exception):
    pass


@pytest.fixture(autouse=True)
def _every_judgement_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_INTERVAL", 0.0)


@pytest.fixture(scope="module")
def start(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationResult:
    """A model whose linears and tied table are quantised."""
    chosen = lambda name: CALIBRATED["imatrix"] if is_linear(name) or name in TABLE else None  # noqa: E731
    return calibrate(short_model, chosen, IDS, work_dir=tmp_path_factory.mktemp("start"))


def _stopping(step: int) -> Callable[[DistilProgress], None]:
    def progress(done: DistilProgress) -> None:
        if done.step >= step:
            raise _StoppedError

    return progress


def _learned(
    folder: Path,
    start: CalibrationResult,
    work: Path,
    effort: Effort = EFFORT,
    identity: str = "a",
    progress: Callable[[DistilProgress], None] | None = None,
) -> tuple[CalibrationResult, Distilled]:
    work.mkdir(exist_ok=True)
    made = replace(start, packed=dict(start.packed), changed=dict(start.changed))
    journal = LearningJournal(work, identity)
    return made, distil(open_walkable(folder), made, IDS, effort, work_dir=work, journal=journal, progress=progress)


def _tensors(made: CalibrationResult) -> dict[str, list[float]]:
    return {name: read_tensor(source).tolist() for name, source in (made.packed | made.changed).items()}


def test_it_ends_as_it_would_have(start: CalibrationResult, short_model: Path, tmp_path: Path) -> None:
    whole, found = _learned(short_model, start, tmp_path / "whole")
    with pytest.raises(_StoppedError):
        _learned(short_model, start, tmp_path / "work", progress=_stopping(8))
    told: list[DistilProgress] = []
    again, gone_on = _learned(short_model, start, tmp_path / "work", progress=told.append)
    assert [each.step for each in told] == [10, 12, 14, 16]
    assert gone_on == found and found.kept
    assert _tensors(again) == _tensors(whole)


def test_a_time_counts_what_was_spent(start: CalibrationResult, short_model: Path, tmp_path: Path) -> None:
    told: list[DistilProgress] = []

    def stop(done: DistilProgress) -> None:
        told.append(done)
        raise _StoppedError

    with pytest.raises(_StoppedError):
        _learned(short_model, start, tmp_path, Effort(seconds=5.0), progress=stop)
    _, found = _learned(short_model, start, tmp_path, Effort(seconds=0.01), progress=told.append)
    assert [each.step for each in told] == [found.steps]  # its time was over


@pytest.mark.parametrize("damage", ["another identity", "cut short", "gone", "of other tensors"])
def test_what_cannot_be_gone_on_with_is_begun_anew(
    damage: str, start: CalibrationResult, short_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(_StoppedError):
        _learned(short_model, start, tmp_path, progress=_stopping(4))
    course = tmp_path / COURSE_NAME
    if damage == "cut short":
        course.write_bytes(course.read_bytes()[:-7])
    elif damage == "gone":
        course.unlink()
    elif damage == "of other tensors":
        start = replace(start, packed={name: start.packed[name] for name in TABLE})
    told: list[DistilProgress] = []
    _learned(short_model, start, tmp_path, Effort(passes=8), "b" if damage == "another identity" else "a", told.append)
    assert told[0].step == 1


def _text(folder: Path) -> Path:
    path = folder / "calib.txt"
    path.write_text((REAL_MODEL / "calib.txt").read_text()[:9000])
    return path


@pytest.mark.nightly
def test_what_the_model_wrote_is_kept_too(tmp_path: Path) -> None:
    text, chosen = _text(tmp_path), {"model.layers.0.self_attn.q_proj.weight": CALIBRATED["tuned"]}

    def quantized(work: str, progress: Callable[[Progress], None]) -> CalibrationResult:
        (tmp_path / work).mkdir(exist_ok=True)
        calibration = TextCalibration(open_source(str(REAL_MODEL)), str(text))
        return calibration.quantized(chosen, tmp_path / work, progress, Effort(passes=16))

    def stop(done: Progress) -> None:
        if isinstance(done, DistilProgress):
            raise _StoppedError

    whole = quantized("whole", lambda _: None)
    with pytest.raises(_StoppedError):
        quantized("work", stop)
    assert (tmp_path / "work" / WRITTEN_NAME).exists()
    told: list[Progress] = []
    again = quantized("work", told.append)
    assert not any(isinstance(each, WritingProgress) for each in told)
    assert _tensors(again) == _tensors(whole)

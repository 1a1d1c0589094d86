"""A calibration that is stopped goes on where it was, and makes what it would have made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from generic_export.weights.values import read_tensor
from t2n_llm.compress import journal
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.calibrate import calibrate
from t2n_llm.compress.calibration import TextCalibration
from t2n_llm.compress.journal import JOURNAL_NAME, CalibrationJournal
from t2n_llm.compress.progress import LayerProgress
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.export.pipeline import export_llm
from t2n_llm.reporter import LogReporter
from t2n_llm.source.hub import open_source
from tests.t2n_llm.compress.test_calibrate import _mixtral, is_linear, text_ids
from tests.trained_model import REAL_MODEL

IDS = text_ids("calib.txt", sequences=9, length=32)


@pytest.fixture(autouse=True)
def _every_layer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_INTERVAL", 0.0)


class _StoppedError(Exception):
    pass


def _stopping(layer: int) -> Callable[[LayerProgress], None]:
    def progress(done: LayerProgress) -> None:
        if done.layer == layer:
            raise _StoppedError

    return progress


def _calibrated(
    folder: Path,
    work: Path,
    algorithm: str,
    identity: str = "a",
    progress: Callable[[LayerProgress], None] | None = None,
) -> CalibrationResult:
    work.mkdir(exist_ok=True)
    chosen = lambda name: CALIBRATED[algorithm] if is_linear(name) or "experts" in name else None  # noqa: E731
    kept = CalibrationJournal(work, identity)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return calibrate(folder, chosen, IDS % vocabulary, work_dir=work, journal=kept, progress=progress)


def _same(one: CalibrationResult, other: CalibrationResult) -> bool:
    tensors = all(
        {name: read_tensor(each).tolist() for name, each in left.items()}
        == {name: read_tensor(each).tolist() for name, each in right.items()}
        for left, right in ((one.packed, other.packed), (one.changed, other.changed))
    )
    seen = all(
        torch.equal(entry.mean_square, other.statistics[name].mean_square)
        and entry.tokens == other.statistics[name].tokens
        for name, entry in one.statistics.items()
    )
    told = (one.errors, one.left, one.unfolded) == (other.errors, other.left, other.unfolded)
    return tensors and seen and told and one.statistics.keys() == other.statistics.keys()


@pytest.mark.parametrize("algorithm", ["awq", "tuned"])
def test_it_makes_what_it_would_have_made(algorithm: str, short_model: Path, tmp_path: Path) -> None:
    whole = _calibrated(short_model, tmp_path / "whole", algorithm)
    with pytest.raises(_StoppedError):
        _calibrated(short_model, tmp_path / "work", algorithm, progress=_stopping(1))
    told: list[LayerProgress] = []
    again = _calibrated(short_model, tmp_path / "work", algorithm, progress=told.append)
    assert [(each.layer, each.begun) for each in told] == [(2, 1)]
    assert _same(whole, again)


def test_experts_are_kept_too(tmp_path: Path) -> None:
    folder = _mixtral(tmp_path)
    whole = _calibrated(folder, tmp_path / "whole", "gptq")
    with pytest.raises(_StoppedError):
        _calibrated(folder, tmp_path / "work", "gptq", progress=_stopping(1))
    told: list[LayerProgress] = []
    assert _same(whole, _calibrated(folder, tmp_path / "work", "gptq", progress=told.append))
    assert told[0].begun == 1


def _damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "damage", ["another identity", "journal cut short", "journal gone", "blocks cut short", "blocks gone"]
)
def test_what_cannot_be_gone_on_with_is_begun_anew(damage: str, short_model: Path, tmp_path: Path) -> None:
    with pytest.raises(_StoppedError):
        _calibrated(short_model, tmp_path, "imatrix", progress=_stopping(1))
    blocks = min(tmp_path.glob("*.q4_0"))
    if damage == "journal cut short":
        _damaged(tmp_path / JOURNAL_NAME)
    elif damage == "journal gone":
        (tmp_path / JOURNAL_NAME).unlink()
    elif damage == "blocks cut short":
        _damaged(blocks)
    elif damage == "blocks gone":
        blocks.unlink()
    told: list[LayerProgress] = []
    _calibrated(short_model, tmp_path, "imatrix", "b" if damage == "another identity" else "a", told.append)
    assert told[0].layer == 1 and told[0].begun == 0


def test_quick_layers_are_not_kept(short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_INTERVAL", 1e6)
    _calibrated(short_model, tmp_path, "imatrix")
    assert not (tmp_path / JOURNAL_NAME).exists()


def test_another_text_is_another_calibration(short_model: Path, tmp_path: Path) -> None:
    (tmp_path / "calib.txt").write_text((REAL_MODEL / "calib.txt").read_text()[:4000])
    (tmp_path / "other.txt").write_text((REAL_MODEL / "calib.txt").read_text()[4000:8000])
    chosen = {"model.layers.0.self_attn.q_proj.weight": CALIBRATED["imatrix"]}
    first: dict[str, int] = {}
    for name in ("calib.txt", "calib.txt", "other.txt"):
        told: list[LayerProgress] = []
        calibration = TextCalibration(open_source(str(short_model)), str(tmp_path / name))
        calibration.quantized(chosen, tmp_path, told.append)
        first.setdefault(name, 0)
        first[name] = len(told)
    assert first == {"calib.txt": 0, "other.txt": 2}  # the second time, both layers were done


class _Told(LogReporter):
    """Keeps what it is told; stops at a word."""

    def __init__(self, stop: str = "") -> None:
        self.stages: list[str] = []
        self.stop = stop

    def stage(self, text: str) -> None:
        self.stages.append(text)
        if self.stop and text.startswith(self.stop):
            raise KeyboardInterrupt

    def calibrated(self) -> list[str]:
        return [text.split(",")[0] for text in self.stages if text.startswith("Calibrated")]


def _export(source: Path, output: Path, reporter: LogReporter, resume: bool) -> Path:
    text = output.parent / "calib.txt"
    text.write_text((REAL_MODEL / "calib.txt").read_text()[:6000])
    recipe = output.parent / "recipe.yaml"
    recipe.write_text("algorithm: gptq\ntensors:\n  q_proj: q4_0\n  up_proj: q4_0\n")
    result = export_llm(
        str(source), output, recipe=recipe, calibration=str(text), check=False, archive="dir",
        reporter=reporter, resume=resume,
    )  # fmt: skip
    return result.archive


def test_an_export_goes_on_behind_its_last_layer(short_model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as stopped:
        _export(short_model, tmp_path / "out", _Told("Calibrated layer 1"), resume=True)
    assert stopped.value.kept.is_dir()  # type: ignore[attr-defined]
    told = _Told()
    archive = _export(short_model, tmp_path / "out", told, resume=True)
    assert told.calibrated() == ["Calibrated layer 2 of 2"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "calib.txt", "recipe.yaml"}
    whole = _export(short_model, tmp_path / "whole", _Told(), resume=False)
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


def test_an_export_that_does_not_calibrate_removes_what_one_left(short_model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _export(short_model, tmp_path / "out", _Told("Calibrated layer 1"), resume=True)
    assert len(list(tmp_path.iterdir())) == 4  # the text, the recipe, a folder and whose it is
    export_llm(str(short_model), tmp_path / "out", check=False, archive="dir")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "calib.txt", "recipe.yaml"}


def test_without_that_nothing_is_left(short_model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _export(short_model, tmp_path / "out", _Told("Calibrated layer 1"), resume=False)
    assert {path.name for path in tmp_path.iterdir()} == {"calib.txt", "recipe.yaml"}

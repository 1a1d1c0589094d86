"""PyTorch in float64 decides where its f32 and ours disagree; what is wrong stays wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from t2n_llm import export_llm
from t2n_llm.zoo.cell import run_cell
from t2n_llm.zoo.float64 import float64_report, head_float64_report
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from t2n_llm.zoo.verdict import RIGHT, Cell, CellVerdict


def test_zamba2_is_what_one_pass_says(tmp_path: Path) -> None:
    """transformers clamps the step size in a pass over a sequence and not in a single step, so f32 is off by more than 1e-4."""
    verdict = run_cell(Cell("zamba2"), tmp_path, lambda _: None)
    assert (verdict.outcome, verdict.reference) == (RIGHT, "f64")
    assert verdict.max_abs_error is not None
    assert verdict.max_abs_error <= 1e-4
    assert CellVerdict.from_json(verdict.to_json()) == verdict


def test_zamba2_in_transformers_differs_from_itself() -> None:
    """If this fails, transformers' two forms agree, and the cell needs no float64."""
    from transformers import DynamicCache

    model = build_tiny_model("zamba2")
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        parts = [ids[:, :12], *ids[:, 12:].split(1, dim=1)]
        steps = torch.cat([model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts], 1)
    assert (steps - whole).abs()[:, 12:].max() > 2e-5


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_float64_and_f32_agree_on_a_model_without_doubt(family: str, tmp_path: Path) -> None:
    checkpoint, export = _exported(family, tmp_path)
    report = float64_report(checkpoint, export, 4)
    assert report.passed
    assert max(check.max_abs_error for check in report.checks) < 1e-5


def test_another_models_archive_is_wrong(tmp_path: Path) -> None:
    checkpoint, export = _exported("llama", tmp_path)
    save_tiny_model(build_tiny_model("llama", seed=1), checkpoint)
    assert not float64_report(checkpoint, export, 4).passed


def test_one_pass_may_be_as_far_off_as_f32_itself(tmp_path: Path) -> None:
    """MobileBERT has no norms between its blocks: random weights give sums of which f32 holds three digits."""
    report = head_float64_report(*_exported("mobilebert", tmp_path, "fill-mask"), "fill-mask")
    assert report.passed
    assert 1e-4 < report.tolerance.max_abs_error <= 1e-2


def test_one_pass_of_another_model_is_wrong(tmp_path: Path) -> None:
    checkpoint, export = _exported("mobilebert", tmp_path, "fill-mask")
    save_tiny_model(build_tiny_model("mobilebert", seed=1, task="fill-mask"), checkpoint, "fill-mask")
    report = head_float64_report(checkpoint, export, "fill-mask")
    assert not report.passed
    assert report.tolerance.max_abs_error <= 1e-2


def test_one_pass_without_doubt_has_the_usual_tolerance(tmp_path: Path) -> None:
    report = head_float64_report(*_exported("bert", tmp_path, "fill-mask"), "fill-mask")
    assert report.passed
    assert report.tolerance.max_abs_error == 1e-4


def _exported(family: str, folder: Path, task: str = "text-generation") -> tuple[Path, Path]:
    save_tiny_model(build_tiny_model(family, task=task), folder / "model", task)
    told = {"dtype": "f32", "archive": "dir", "decode_steps": 4, "require_tokenizer": False, "check": False}
    export_llm(str(folder / "model"), folder / "export", task=task, **told)
    return folder / "model", folder / "export"

"""PyTorch in float64 decides where its f32 and ours disagree; what is wrong stays wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from t2n_llm import export_llm
from t2n_llm.check.agreement import ValidationReport
from t2n_llm.zoo.cell import run_cell
from t2n_llm.zoo.float64 import float64_report, head_float64_report
from t2n_llm.zoo.float64_prompts import prompts_float64_report
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model
from t2n_llm.zoo.verdict import RIGHT, Cell, CellVerdict
from tests.t2n_llm.zoo.attention_families import changed_config

Exported = tuple[Path, Path]  # checkpoint, export
_WITHOUT_NORMS = {"num_hidden_layers": 1, "num_feedforward_networks": 1, "initializer_range": 0.4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _exported("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def mobilebert(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Without norms between its blocks, random weights give sums that are right to three digits in f32."""
    return _exported("mobilebert", tmp_path_factory.mktemp("mobilebert"), "fill-mask", **_WITHOUT_NORMS)


def test_zamba2_is_what_one_pass_says(tmp_path: Path) -> None:
    """transformers clamps the step size in a pass over a sequence and not in a single step, so f32 is off by more than 1e-4."""
    short = {"num_hidden_layers": 2, "layers_block_type": ["hybrid", "hybrid"], "time_step_min": 4e-3}
    with changed_config("zamba2", short):
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


def test_float64_and_f32_agree_on_a_model_without_doubt(llama: Exported) -> None:
    _agree(float64_report(*llama, 4))


def test_float64_and_f32_agree_on_experts(tmp_path: Path) -> None:
    """Their grouped product has no float64 form."""
    _agree(float64_report(*_exported("mixtral", tmp_path, num_hidden_layers=1), 4))


def _agree(report: ValidationReport) -> None:
    assert report.passed
    assert max(check.max_abs_error for check in report.checks) < 1e-5


def test_another_models_archive_is_wrong(llama: Exported, tmp_path: Path) -> None:
    with changed_config("llama", {"num_hidden_layers": 1}):
        save_tiny_model(build_tiny_model("llama", seed=1), tmp_path / "other")
    assert not float64_report(tmp_path / "other", llama[1], 4).passed


def test_one_pass_may_be_as_far_off_as_f32_itself(mobilebert: Exported) -> None:
    report = head_float64_report(*mobilebert, "fill-mask")
    assert report.passed
    assert 1e-4 < report.tolerance.rtol <= 1e-2


def test_one_pass_of_another_model_is_wrong(mobilebert: Exported, tmp_path: Path) -> None:
    with changed_config("mobilebert", _WITHOUT_NORMS):
        other = build_tiny_model("mobilebert", seed=1, task="fill-mask")
    save_tiny_model(other, tmp_path / "other", "fill-mask")
    report = head_float64_report(tmp_path / "other", mobilebert[1], "fill-mask")
    assert not report.passed
    assert report.tolerance.rtol <= 1e-2


def test_one_pass_without_doubt_has_the_usual_tolerance(tmp_path: Path) -> None:
    report = head_float64_report(*_exported("bert", tmp_path, "fill-mask", num_hidden_layers=1), "fill-mask")
    assert report.passed
    assert report.tolerance.rtol == 1e-4


def test_prompts_with_images(tmp_path: Path) -> None:
    task = "image-text-to-text"
    checkpoint, export = _exported("llava", tmp_path, task)
    report = prompts_float64_report(checkpoint, export, task)
    _agree(report)
    assert report.tolerance.rtol == 1e-4
    save_tiny_model(build_tiny_model("llava", seed=1, task=task), tmp_path / "other", task)
    assert not prompts_float64_report(tmp_path / "other", export, task).passed


def _exported(family: str, folder: Path, task: str = "text-generation", **changes: Any) -> Exported:
    with changed_config(family, changes):
        save_tiny_model(build_tiny_model(family, task=task), folder / "model", task)
    told: dict[str, Any] = {
        "dtype": "f32",
        "archive": "dir",
        "decode_steps": 4,
        "require_tokenizer": False,
        "check": False,
    }
    export_llm(str(folder / "model"), folder / "export", task=task, **told)
    return folder / "model", folder / "export"

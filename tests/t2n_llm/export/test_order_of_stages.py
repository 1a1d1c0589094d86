"""An export runs forward: PyTorch first, then the writing, then the check; no stage runs twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from generic_export.errors import NumericRangeError
from t2n_llm.export.output import ExportResult
from t2n_llm.export.pipeline import export_llm
from t2n_llm.graph.capture import CAPTURING
from t2n_llm.reporter import LogReporter
from tests.families import config, save_tiny_model

REFERENCE, WRITING, CHECKING = (
    "Running PyTorch in f32 for reference",
    "Writing model.nnef",
    "Checking in tract: prefill",
)


class Stages(LogReporter):
    """Remembers the stages that the tests ask about, and the warnings."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.warnings: list[str] = []

    def stage(self, title: str) -> None:
        if title in (CAPTURING, REFERENCE, WRITING, CHECKING) or title.startswith("Measuring"):
            self.titles.append(title)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture(scope="module")
def large_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys exceed f16, and whose scores are scaled down by as much."""
    scaled = {"granite": config("granite", attention_multiplier=0.25 * 2.0**-16)}
    folder = save_tiny_model("granite", tmp_path_factory.mktemp("models") / "large-keys", configs=scaled)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(2.0**16)
    model.save_pretrained(folder)
    return folder


def _exported(source: Path, target: Path, stages: Stages, **options: Any) -> ExportResult:
    settings: dict[str, Any] = {"archive": "dir", "require_tokenizer": False, "decode_steps": 3}
    return export_llm(str(source), target, reporter=stages, **(settings | options))


def test_keys_beyond_f16_are_measured_before_the_only_capture_is_stored(large_keys: Path, tmp_path: Path) -> None:
    stages = Stages()
    result = _exported(large_keys, tmp_path / "out", stages)
    assert stages.titles == [CAPTURING, REFERENCE, WRITING, CHECKING]
    assert any("f16 holds at most 65504: caches are f32" in warning for warning in stages.warnings)
    assert {state["dtype"] for state in result.manifest["graph"]["states"]} == {"f32"}
    assert result.validation is not None and result.validation.largest_states["cache_key"] > 65504


def test_f16_caches_that_do_not_hold_the_keys_are_refused_before_the_writing(large_keys: Path, tmp_path: Path) -> None:
    stages = Stages()
    with pytest.raises(NumericRangeError, match=r"cache_key of layer \d reaches") as refusal:
        _exported(large_keys, tmp_path / "out", stages, cache_dtype="f16")
    assert "--cache-dtype f32" in (refusal.value.hint or "")
    assert stages.titles == [CAPTURING, REFERENCE]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("activations", ["auto", "f16"])
def test_without_a_check_nothing_is_measured(activations: str, large_keys: Path, tmp_path: Path) -> None:
    stages = Stages()
    result = _exported(large_keys, tmp_path / "out", stages, check=False, activations=activations)
    assert stages.titles == [CAPTURING, WRITING]
    assert result.validation is None and not result.manifest["activation_ranges"]


def test_a_compressed_export_compares_with_the_original_before_the_writing(tiny_llama: Path, tmp_path: Path) -> None:
    stages = Stages()
    result = _exported(tiny_llama, tmp_path / "out", stages, compress="q4_0+embeddings")
    assert stages.titles == [CAPTURING, REFERENCE, WRITING, REFERENCE, CHECKING]
    assert result.validation is not None and result.validation.passed
    assert result.validation.original is not None and result.validation.original.mean_kl_divergence > 1e-3

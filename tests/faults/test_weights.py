"""Weights that say something wrong: not finite, too small for f16, tied in the config and two in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from generic_export.errors import NonFiniteWeightError
from generic_export.weights.half import CastReport, CastTensor, FlushedCount, NonFiniteCount, watched_tensor
from generic_export.weights.source import InMemoryTensor
from generic_export.weights.values import read_tensor
from t2n_llm.export.pipeline import export_llm
from t2n_llm.export.revalidate import validate_folder
from t2n_llm.reporter import LogReporter
from tests.t2n_llm.command_line import call, refused, unchanged

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


class Heard(LogReporter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.stages: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def stage(self, title: str) -> None:
        self.stages.append(title)


def change(model: Path, dtype: torch.dtype = torch.float32, **changes: torch.Tensor) -> None:
    """Write the checkpoint once more, with tensors by name (`_` for `.` is spelt out by the caller)."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(model / WEIGHTS).items()} | changes
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def with_values(model: Path, name: str, places: Sequence[tuple[int, int]], value: float) -> torch.Tensor:
    tensor = load_file(model / WEIGHTS)[name].clone()
    for place in places:
        tensor[place] = value
    return tensor


# --- not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(value: float, dtype: str, model: Path, parent: Path) -> None:
    change(model, **{UP: with_values(model, UP, [(7, 5), (7, 6), (95, 63)], value)})
    with unchanged(parent):
        outcome = call("export", model, "-o", parent / "x", "--no-tokenizer", "--no-check", "--dtype", dtype)
    refused(outcome, UP, "3 ", "NaN" if value != value else "infinite", "[7, 5]")
    assert "--allow-nonfinite" in outcome.line("hint")


def test_what_is_allowed_is_told_and_recorded(model: Path, parent: Path) -> None:
    change(model, **{UP: with_values(model, UP, [(0, 1)], float("nan"))})
    heard = Heard()
    result = export_llm(
        *(str(model), parent / "x"), check=False, require_tokenizer=False, allow_nonfinite=True, reporter=heard
    )
    assert result.manifest["nonfinite"] == {UP: {"nan": 1, "inf": 0, "first": (0, 1)}}
    assert any(UP in warning and "1 NaN value" in warning for warning in heard.warnings)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.float16, torch.float32])
def test_every_pair_of_types_is_looked_at(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.ones(3, 300_000, dtype=source)
    values[1, 299_999], values[2, 0], values[2, 299_999] = float("nan"), float("-inf"), float("inf")
    report = CastReport()
    watched = watched_tensor(InMemoryTensor("w", values), target, report)
    torch.testing.assert_close(read_tensor(watched), values.to(target), equal_nan=True)
    assert report.nonfinite == {"w": NonFiniteCount(1, 2, (1, 299_999))}
    with pytest.raises(NonFiniteWeightError, match="w: 1 NaN and 2 infinite values, the first at"):
        read_tensor(watched_tensor(InMemoryTensor("w", values), target, CastReport(refuses_nonfinite=True)))


# --- too small --------------------------------------------------------------------------------


def test_what_becomes_zero_is_counted() -> None:
    torch.manual_seed(3)
    values = torch.randn(700_001).bfloat16()
    values[:3] = torch.tensor([0.0, -0.0, 1.0])
    tiny = torch.randperm(len(values))[:1000]
    values[tiny] = values[tiny] * 1e-9
    expected = (values != 0) & (values.to(torch.float16) == 0)
    report = CastReport()
    read_tensor(CastTensor(InMemoryTensor("w", values), torch.float16, report))
    largest = values[expected].abs().max().item()
    assert report.flushed == {"w": FlushedCount(int(expected.sum()), 700_001, largest)}
    assert int(expected.sum()) > 900
    read_tensor(CastTensor(InMemoryTensor("w", values), torch.float32, report := CastReport()))
    assert report.flushed == {}


def test_zeros_are_no_loss() -> None:
    report = CastReport(refuses_nonfinite=True)
    for values in (torch.zeros(600_000), -torch.zeros(20), torch.zeros(0)):
        read_tensor(CastTensor(InMemoryTensor("w", values), torch.float16, report))
    assert (report.flushed, report.nonfinite, report.overflows) == ({}, {}, {})


def test_a_tensor_of_small_values_is_warned_about(model: Path, parent: Path) -> None:
    change(model, **{UP: load_file(model / WEIGHTS)[UP] * 1e-9})
    heard = Heard()
    result = export_llm(str(model), parent / "x", check=False, require_tokenizer=False, reporter=heard)
    lost = result.manifest["f16_underflows"][UP]
    assert lost["values"] == 96 * 64 and lost["count"] > 0.9 * lost["values"] and lost["max_abs"] < 6e-8
    assert any("too small for f16" in warning and f"--keep-f32 {UP}" in warning for warning in heard.warnings)


# --- tied -------------------------------------------------------------------------------------


def test_what_the_checkpoint_contradicts_is_not_tied(model: Path, parent: Path) -> None:
    torch.manual_seed(1)
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    change(model, **{HEAD: torch.randn(160, 64) * 0.1})
    heard = Heard()
    result = export_llm(
        *(str(model), parent / "x"), require_tokenizer=False, dtype="f32", decode_steps=3, reporter=heard
    )
    assert result.validation is not None and result.validation.passed
    assert {HEAD, TABLE} <= set(result.manifest["tensors"])
    (told,) = [warning for warning in heard.warnings if "ties" in warning]
    assert HEAD in told and TABLE in told and "\n" not in told
    assert validate_folder(parent / "x", str(model)).passed


def test_equal_tensors_stay_tied(model: Path, parent: Path) -> None:
    change(model, **{HEAD: load_file(model / WEIGHTS)[TABLE].clone()})
    heard = Heard()
    result = export_llm(str(model), parent / "x", check=False, require_tokenizer=False, reporter=heard)
    assert HEAD not in result.manifest["tensors"]
    assert not [warning for warning in heard.warnings if "ties" in warning]


# --- nothing at all ---------------------------------------------------------------------------


def test_a_model_of_zeros_is_said_to_be_one(model: Path, parent: Path) -> None:
    change(model, **{name: tensor * 0 for name, tensor in load_file(model / WEIGHTS).items()})
    with unchanged(parent):
        outcome = call("export", model, "-o", parent / "x", "--no-tokenizer", "--decode-steps", 2, "--dtype", "f32")
    refused(outcome, "every matrix of the model is zero")

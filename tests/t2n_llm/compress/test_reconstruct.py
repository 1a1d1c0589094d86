"""Linears quantised a second time: kept where the layer comes nearer to the original, as it was before where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from generic_export.weights.values import read_tensor
from quant.gptq import GptqQuantizer
from t2n_llm.compress.algorithms import CALIBRATED
from t2n_llm.compress.calibrate import calibrate
from t2n_llm.compress.calibration import TextCalibration, _texts_of_layers
from t2n_llm.compress.observe import Run
from t2n_llm.compress.reconstruct import Original, distance, reconstruct, replace_weight, split
from t2n_llm.compress.result import CalibrationResult
from t2n_llm.source.hub import open_source
from tests.families import FAMILIES, save_tiny_model
from tests.recurrent_families import RECURRENT_FAMILIES
from tests.t2n_llm.compress.test_calibrate import _mixtral, is_linear
from tests.trained_model import REAL_MODEL

TOKENS = torch.randint(3, 160, (12, 32), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """Two branches that read the same, one linear behind them, and one that only some positions reach."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.out, self.routed = nn.Linear(96, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        made = self.out(self.left(states).tanh() * self.right(states))
        made[:, ::2] += self.routed(states[:, ::2])
        return made


LINEARS = ("left", "right", "out", "routed")


@torch.no_grad()
def runs_of(layer: nn.Module, states: torch.Tensor) -> list[Run]:
    return [torch.no_grad()(lambda row=row: layer(row.unsqueeze(0))) for row in states]


def altered_layer(noise: float) -> tuple[Layer, dict[str, torch.Tensor], list[Run], Original]:
    """A layer quantised by GPTQ, and what it did before on inputs that were then altered."""
    torch.manual_seed(0)
    layer = Layer()
    true = torch.randn(16, 40, 64) @ torch.randn(64, 64) / 8
    original = Original.of(layer, runs_of(layer, true), LINEARS)
    weights = {name: layer.get_parameter(f"{name}.weight").detach() for name in LINEARS}
    for name, weight in weights.items():
        replace_weight(layer.get_submodule(name), GptqQuantizer().quantize(weight).dequantize())
    systematic = true @ (torch.eye(64) + 0.05 * torch.randn(64, 64))
    altered = torch.randn_like(true) if noise else systematic
    return layer, weights, runs_of(layer, altered), original


def rebuilt(layer: Layer, weights: dict[str, torch.Tensor], runs: list[Run], original: Original) -> dict:
    return reconstruct(layer, weights, dict.fromkeys(weights, GptqQuantizer()), runs, original, 32)


def test_linears_are_grouped_by_what_they_read_in_the_order_of_their_calls() -> None:
    _, _, _, original = altered_layer(0.0)
    assert original.groups == (["left", "right"], ["out"])  # the routed one misses positions
    assert set(original.inputs) == {"left", "right", "out"} and len(original.inputs["out"]) == 16


def test_a_layer_with_altered_inputs_comes_nearer_to_the_original() -> None:
    layer, weights, runs, original = altered_layer(0.0)
    judging = split(len(runs))[1]
    wanted = [original.outputs[index] for index in judging]
    before = distance([runs[index]() for index in judging], wanted)
    made = rebuilt(layer, weights, runs, original)
    assert set(made) == {"left", "right", "out"}
    for name, each in made.items():
        assert torch.equal(layer.get_parameter(f"{name}.weight"), each.blocks.dequantize())
    assert distance([runs[index]() for index in judging], wanted) < 0.5 * before


def test_a_layer_stays_as_it_was_where_nothing_can_be_learned() -> None:
    layer, weights, runs, original = altered_layer(1.0)  # inputs that say nothing of the true ones
    chance = {name: torch.randn_like(weight) for name, weight in weights.items()}
    before = {name: layer.get_parameter(f"{name}.weight").clone() for name in LINEARS}
    assert rebuilt(layer, {name: 9 * value for name, value in chance.items()}, runs, original) == {}
    assert all(torch.equal(layer.get_parameter(f"{name}.weight"), values) for name, values in before.items())


@pytest.mark.parametrize(
    ("count", "learned", "judging"), [(1, [0], [0]), (3, [1, 2], [0]), (9, [*range(1, 8)], [0, 8])]
)
def test_runs_that_judge_are_not_learned_from(count: int, learned: list[int], judging: list[int]) -> None:
    assert split(count) == (learned, judging)


def calibrated(folder: Path, work: Path, ids: torch.Tensor, algorithm: str) -> CalibrationResult:
    work.mkdir()
    linear = lambda name: is_linear(name) or "experts" in name  # noqa: E731
    return calibrate(folder, lambda name: CALIBRATED[algorithm] if linear(name) else None, ids, work_dir=work)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral", "mamba"])
def test_layers_of_every_kind_are_walked_and_give_the_same_values_again(family: str, tmp_path: Path) -> None:
    if family == "mixtral":
        folder = _mixtral(tmp_path)
    else:
        folder = save_tiny_model(family, tmp_path / "model", configs=FAMILIES | RECURRENT_FAMILIES)
    first, second = (calibrated(folder, tmp_path / name, TOKENS, "tuned") for name in ("first", "second"))
    assert any("down_proj" in name or "out_proj" in name for name in first.packed) and first.errors == second.errors
    assert all(torch.equal(read_tensor(first.packed[name]), read_tensor(second.packed[name])) for name in first.packed)
    assert {error.algorithm for error in first.errors.values()} == {"tuned"}


def _texts(algorithm: str, **sizes: Any) -> int:
    return _texts_of_layers({"a": CALIBRATED[algorithm]}, AutoConfig.for_model("llama", **sizes))


def test_layers_that_reconstruct_read_as_many_texts_as_memory_allows() -> None:
    assert _texts("gptq", hidden_size=256, intermediate_size=1024) == 32
    assert _texts("tuned", hidden_size=256, intermediate_size=1024) == 96
    assert _texts("tuned", hidden_size=4096, intermediate_size=14336) == 39
    assert _texts("tuned", hidden_size=16384, intermediate_size=53248) == 32


@pytest.mark.nightly
def test_more_texts_are_read_where_layers_reconstruct(first_layers: Callable[[int], Path], tmp_path: Path) -> None:
    calibration = TextCalibration(open_source(str(first_layers(1))), str(REAL_MODEL / "calib.txt"))
    name, read = "model.layers.0.self_attn.q_proj.weight", {}
    for algorithm in ("tuned", "gptq"):
        made = calibration.quantized({name: CALIBRATED[algorithm]}, tmp_path, lambda _: None)
        read[algorithm] = made.errors[name].tokens
    assert read["gptq"] == 32 * 512 and read["tuned"] > 2 * read["gptq"]  # less the texts that only judge

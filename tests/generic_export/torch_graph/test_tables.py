"""Tables of positions bound sizes, also sums of them, and a capture that meets one begins again at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from generic_export import DynamicSize, TractNNEF, export_model_to_nnef
from generic_export.capture import capture
from generic_export.errors import EngineRunError, SpecializedAxisError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.ir import TorchModuleIRGraph
from tests.engine_check import check

_RUN: list[int] = []
"""The tables that were asked, by their sizes; what a capture changes in a module it puts back."""


class Layer(nn.Module):
    """Biases by place, from a table."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, places * places).reshape(places, places))

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _RUN.append(len(self.table))
        whole = torch.cat([past, x], 1)
        total, new = whole.shape[1], x.shape[1]
        scores = x @ whole.transpose(1, 2) + self.table[total - new : total, :total]
        return scores.softmax(-1) @ whole, whole


class Model(nn.Module):
    def __init__(self, places: tuple[int, ...] = (64, 64, 64)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, places))

    def forward(self, x: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for layer, before in zip(self.layers, past, strict=True):
            x, whole = layer(x, before)
            kept.append(whole)
        return (x, *kept)


def _inputs(new: int, before: int, layers: int = 3) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(new)
    return tuple(torch.randn(1, size, 8) for size in (new, *[before] * layers))


def _axes(layers: int = 3) -> dict[str, dict[int, str]]:
    return {"x": {1: "S"}} | {f"past_{place}": {1: "P"} for place in range(layers)}


def _captured(model: nn.Module) -> TorchModuleIRGraph:
    return capture(model, _inputs(5, 7), TractNNEF(dynamic_axes=_axes(), check_io=False), tuple(_axes()))


def test_a_table_bounds_a_sum_of_sizes() -> None:
    _RUN.clear()
    graph = _captured(Model((64, 48, 66)))
    assert {each.relation for each in graph.conditions} >= {"P+S <= 48", "P+S <= 64", "P+S <= 66"}
    assert not any("min" in str(op).lower() for op in graph.ops)
    assert _RUN.count(66) == 1  # the first table ended the first attempt


def test_the_engine_holds_to_it(tmp_path: Path) -> None:
    target = TractNNEF(dynamic_axes=_axes())
    archive = export_model_to_nnef(Model(), _inputs(5, 7), tmp_path / "m", target, tuple(_axes()))
    for new, before, fits in ((1, 63, True), (30, 34, True), (1, 64, False), (30, 35, False)):
        inputs = [each.numpy() for each in _inputs(new, before)]
        with TractWheel(timeout_seconds=60).load(archive) as engine:
            if fits:
                engine.run(inputs)
                continue
            with pytest.raises(EngineRunError, match="scenario"):
                engine.run(inputs)


def test_in_the_engine() -> None:
    check(
        Model(),
        _inputs(5, 7),
        _inputs(1, 30),
        _inputs(20, 3),
        dynamic_axes={f"input_{i}": {1: "PS"[i == 0]} for i in range(4)},
    )


class Beside(nn.Module):
    """A table along the second of three axes, the first of which is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(0, (-1, 2)).sum(1)
        return halves + self.table[: x.shape[1], None]


def test_a_bound_is_that_of_its_own_axis_beside_a_declared_multiple() -> None:
    axes = {"x": {0: DynamicSize("B", multiple_of=2), 1: "S", 2: "T"}}
    graph = capture(Beside(), (torch.randn(4, 5, 6),), TractNNEF(dynamic_axes=axes, check_io=False), ("x",))
    assert {bound.name: bound.upper for bound in graph.symbols} == {"B": None, "S": 20, "T": None}


def test_a_size_that_is_frozen_is_no_bound(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(1, 5, 8)

    with pytest.raises(SpecializedAxisError):
        export_model_to_nnef(
            Frozen(),
            _inputs(5, 7)[0],
            tmp_path / "model.nnef.tgz",
            input_names=["x"],
            inference_target=TractNNEF(dynamic_axes={"x": {1: "S"}}),
        )


class Halving(nn.Module):
    """Layers with a stride, which ask of each size whether one row is left."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv2d(2, 2, 3, stride=2, padding=1) for _ in range(3))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.stem:
            x = conv(x).relu_()
        return self.last(x)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def test_halved_sizes_in_the_engine() -> None:
    pictures = [(torch.rand(1, 2, height, width),) for height, width in ((20, 24), (7, 33), (1, 2))]
    check(Halving(Mean()), *pictures, dynamic_axes={"input_0": {2: "H", 3: "W"}})

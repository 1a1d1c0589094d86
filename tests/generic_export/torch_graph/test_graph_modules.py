"""Graphs as modules: torch.fx's, and what torch.export gives back, which runs them node by node and refuses `eval()`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.inference_target.tract.engines.wheel import TractWheel


class Pair(nn.Module):
    """Takes a dict and a keyword, and returns two tensors in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(batch["a"]) + batch["b"]
        return {"scaled": y * scale, "plain": y}


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)).eval()


def exported(model: nn.Module) -> nn.Module:
    return torch.export.export(model, (torch.randn(2, 4),), dynamic_shapes=({0: torch.export.Dim("B")},)).module()


@pytest.mark.parametrize("made", [torch.fx.symbolic_trace, exported])
def test_a_graph_is_a_module_like_others(made, tmp_path: Path) -> None:
    model = stack()
    graph = made(model)
    modes = [module.training for module in graph.modules()]
    target = TractNNEF(dynamic_axes={"input": {0: "B"}})
    archive = export_model_to_nnef(
        graph, torch.randn(2, 4), tmp_path / "m", target, compression_level=None, log_level=None
    )
    assert [module.training for module in graph.modules()] == modes
    assert sorted(path.name for path in archive.glob("*.dat")) == [
        "0.bias.dat",
        "0.weight.dat",
        "3.bias.dat",
        "3.weight.dat",
    ]
    with TractWheel().load(archive) as engine, torch.no_grad():
        for batch in (1, 5):
            x = torch.randn(batch, 4)
            np.testing.assert_allclose(engine.run([x.numpy()])[0], model(x).numpy(), atol=1e-5)


def test_nested_arguments(tmp_path: Path) -> None:
    model = Pair().eval()
    args, kwargs = ({"a": torch.randn(2, 4), "b": torch.randn(2, 3)},), {"scale": torch.tensor(3.0)}
    graph = torch.export.export(model, args, kwargs).module()
    archive = export_model_to_nnef(
        graph, args, tmp_path / "m", TractNNEF(), kwargs=kwargs, compression_level=None, log_level=None
    )
    text = (archive / "graph.nnef").read_text()
    assert "batch_a, batch_b, scale) -> (scaled, plain)" in " ".join(text.split())
    assert (archive / "linear.weight.dat").exists()

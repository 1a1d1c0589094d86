"""What divides a length asks things of it that hold only above some size: a declared lower bound says where that is."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.export import Dim

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.capture import capture
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.torch_graph.capture import archive_conditions


class Listener(nn.Module):
    """Samples [B, T] become positions as Moonshine's first layers make them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 127, stride=64, bias=False)
        self.norm = nn.GroupNorm(1, 8)
        self.second = nn.Conv1d(8, 16, 7, stride=3)
        self.third = nn.Conv1d(16, 8, 3, stride=2)
        self.mix = nn.Linear(8, 8)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return [B, positions, 8]."""
        hidden = self.norm(torch.tanh(self.first(samples[:, None])))
        hidden = self.third(nn.functional.gelu(self.second(hidden))).permute(0, 2, 1)
        positions = hidden.shape[1]
        return self.mix(hidden).flatten(1).view(samples.shape[0], positions, -1)  # is its size a multiple of positions?


def _export(folder: Path, length: Dim) -> Path:
    torch.manual_seed(0)
    archive = folder / "listener.nnef.tar"
    target = TractNNEF(dynamic_axes={"samples": {1: length}}, check_io=False)
    export_model_to_nnef(Listener().eval(), torch.zeros(1, 3456), archive, target, ["samples"], ["positions"])
    return archive


def test_a_length_with_a_lower_bound_stays_dynamic(tmp_path: Path) -> None:
    archive = _export(tmp_path, Dim("T", min=1279))
    torch.manual_seed(0)
    module = Listener().eval()
    with TractWheel().load(archive) as model:
        for length in (1279, 1920, 6528):
            samples = torch.from_numpy(np.random.default_rng(length).standard_normal((1, length)).astype(np.float32))
            (got,) = model.run([samples.numpy()])
            with torch.no_grad():
                wanted = module(samples).numpy()
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def _conditions() -> list[tuple[str | None, bool]]:
    layers = nn.Sequential(nn.Conv1d(2, 2, 3), nn.ReLU(), nn.Conv1d(2, 2, 5)).eval()
    graph = capture(layers, (torch.randn(1, 2, 9),), TractNNEF(dynamic_axes={"input": {2: "T"}}), ["input"])
    return [(each.relation, each.required) for each in graph.conditions]


def test_of_several_smallest_sizes_one_is_left() -> None:
    assert _conditions() == [("T >= 7", False)]


def test_in_a_large_graph_what_the_module_refuses_itself_is_left_to_it() -> None:
    with mock.patch.object(archive_conditions, "_MOST_OPERATORS_CHECKED", 0):
        assert _conditions() == [("T >= 7", True)]

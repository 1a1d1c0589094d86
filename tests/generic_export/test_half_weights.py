"""`half=True`: matrices in f16, arithmetic in f32, compared in the engine with the module that has the same numbers."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import KhronosNNEF, TractNNEF, export_model_to_nnef
from generic_export.errors import MismatchError, OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel


class Picture(nn.Module):
    """A residual stack with kernels of every form, norms, a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.BatchNorm2d(16)
        self.back = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.table = nn.Embedding(8, 16)
        self.recurrence = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, picture: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = self.back(self.norm(self.depthwise(self.stem(picture))).relu())
        x = x.mean((2, 3)) + self.table(kind)
        return self.head(self.recurrence(x[:, None])[0][:, 0])


def example(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.arange(batch) % 8


def test_half_the_bytes_and_the_numbers_of_the_rounded_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Picture().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = TractNNEF(dynamic_axes={"picture": {0: "B"}, "kind": {0: "B"}}, check_io=True)
    halved = export_model_to_nnef(
        model, example(2, 16), tmp_path / "half", target, compression_level=None, half=True, log_level=None
    )
    plain = export_model_to_nnef(
        model, example(2, 16), tmp_path / "plain", target, compression_level=None, log_level=None
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    sizes = [sum(path.stat().st_size for path in archive.glob("*.dat")) for archive in (halved, plain)]
    assert sizes[0] < 0.65 * sizes[1]
    rounded = Picture().eval()
    named = dict(model.named_parameters())
    rounded.load_state_dict(
        {n: t.half().float() if n in named and t.ndim >= 2 else t for n, t in model.state_dict().items()}
    )
    inputs = example(5, 16)
    with TractWheel().load(halved) as engine, torch.no_grad():
        (answer,) = engine.run([each.numpy() for each in inputs])
        np.testing.assert_allclose(answer, rounded(*inputs).numpy(), atol=1e-5)
        assert np.abs(answer - model(*inputs).numpy()).max() > 1e-5  # or nothing was rounded


def test_a_tensor_beyond_the_range_stays_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[0].weight[1, 2] = 1e5
    with caplog.at_level(logging.WARNING):
        archive = export_model_to_nnef(
            model, torch.randn(2, 4), tmp_path / "m", TractNNEF(), compression_level=None, half=True, log_level=None
        )
    assert "0.weight stays in f32" in caplog.text
    graph = (archive / "graph.nnef").read_text()
    assert "# f32 [4,4]" in graph and "# f16 [4,4]" in graph


def test_a_check_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    calls: list[None] = []

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return self.linear(x) + len(calls)

    model = Drawn().eval()
    before = model.linear.weight.detach().clone()
    with pytest.raises(MismatchError):
        export_model_to_nnef(model, torch.randn(2, 4), tmp_path / "m", TractNNEF(), half=True, log_level=None)
    assert torch.equal(model.linear.weight, before) and not torch.equal(before, before.half().float())


def test_only_tract_mixes_element_types(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="half"):
        export_model_to_nnef(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "m", KhronosNNEF(), half=True)

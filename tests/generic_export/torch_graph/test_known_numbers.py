"""Numbers that a module makes tensors of, and what it computes of them, are in the graph: also for modules without values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from generic_export import TractNNEF
from generic_export.capture import capture
from tests.engine_check import check

aten = torch.ops.aten


class Cutoff(nn.Module):
    """A threshold from a quantile of the normal distribution, as Gemma 3n has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = torch.tensor(0.95, dtype=torch.float32, device=x.device)
        quantile = torch.distributions.normal.Normal(0, 1).icdf(share).type(x.dtype)
        return torch.relu(x - x.mean(-1, keepdim=True) - x.std(-1, keepdim=True, unbiased=False) * quantile)


class Listed(nn.Module):
    """An index given as a list, and a list made a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, [-1, 0]] * torch.tensor([2.0, 3.0], device=x.device)


@pytest.mark.parametrize("model", [Cutoff(), Listed()])
def test_in_the_engine(model: nn.Module) -> None:
    torch.manual_seed(0)
    check(model, (torch.randn(3, 8),), (torch.randn(5, 8),), dynamic_axes={"input_0": {0: "S"}})


def test_a_chain_of_numbers_is_one_number() -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "S"}}, check_io=False)
    graph = capture(Cutoff(), (torch.randn(3, 8, device="meta"),), target, ("x",), ("y",))
    fills = [op for op in graph.ops if op.target is aten.full.default]
    assert not graph.constants
    assert any(math.isclose(float(op.args[1]), 1.6448536, rel_tol=1e-5) for op in fills)  # type: ignore[arg-type]
    assert not any(op.target in (aten.erfinv.default, aten.log.default, aten.where.self) for op in graph.ops)


def test_nothing_is_stored_for_a_module_without_values() -> None:
    target = TractNNEF(dynamic_axes={"x": {0: "S"}}, check_io=False)
    graph = capture(Listed(), (torch.randn(3, 8, device="meta"),), target, ("x",), ("y",))
    assert not [name for name, value in graph.constants.items() if value.device.type == "meta"]

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


class Visible(nn.Module):
    """The mean of what a mask leaves, which hides nothing (TimesFM)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.stack([torch.zeros_like(x, dtype=torch.long)])[0].to(x.device).view(x.shape[0], -1, 4)
        mean = torch.zeros(x.shape[0], device=x.device)
        for patch, mask in zip(x.view(x.shape[0], -1, 4).unbind(1), (hidden >= 0.5).unbind(1), strict=True):
            seen = (~mask).to(x.dtype)
            count = seen.sum(dim=-1)
            mean = mean + torch.where(count == 0, mean, (patch * seen).sum(-1) / torch.where(count == 0, 1.0, count))
        return mean


class PaddedPaths(nn.Module):
    """An index of padding wherever there is nothing else, looked up (MarkupLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 5) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        paths = 7 * torch.ones([*ids.shape, 3], dtype=torch.long, device=ids.device)
        return torch.cat([table(paths[:, :, place]) for place, table in enumerate(self.tables)], -1) + ids[..., None]


def test_masks_that_hide_nothing_are_counted_once() -> None:
    model, axes = Visible(), {"input_0": {0: "B"}}
    check(model, (torch.randn(3, 8),), (torch.randn(1, 8),), (torch.randn(5, 8),), dynamic_axes=axes)
    target = TractNNEF(dynamic_axes={"x": {0: "B"}}, check_io=False)
    graph = capture(model, (torch.randn(3, 8, device="meta"),), target, ("x",), ("y",))
    assert not any(op.target in (aten.bitwise_not.default, aten.eq.Scalar, aten.ge.Scalar) for op in graph.ops)


def test_tables_are_looked_up_at_a_number() -> None:
    torch.manual_seed(0)
    others = [(torch.randint(9, shape),) for shape in ((1, 1), (2, 7))]
    check(PaddedPaths(), (torch.randint(9, (3, 4)),), *others, dynamic_axes={"input_0": {0: "B", 1: "S"}})


def test_a_long_way_to_an_input_is_walked_once() -> None:
    """As long as Python lets functions call each other, and longer."""

    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(400):
                x = (x * 0.5).relu()
            return x

    graph = capture(Long(), (torch.randn(3, 8),), TractNNEF(check_io=False), ("x",), ("y",))
    assert len(graph.ops) == 800


class Groups(nn.Module):
    """What belongs together, where nothing does: numbers chosen, padded and looked up (GIT's masks)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = torch.where(torch.zeros_like(x, dtype=torch.int) == 1, 0, -1)
        padded = torch.nn.functional.pad(groups, (0, 3), value=-1)
        places = torch.arange(x.shape[1], device=x.device)
        return x * ((padded[0, places] == padded[0, places[:, None]]) & (padded[0, places] >= 0)).any(0) + x


class ChosenByNumber(nn.Module):
    """One value for all places, by a condition that is known: of the size of the condition."""

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(torch.zeros_like(x, dtype=torch.int) == 1, a, b)
        places = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
        return torch.cat([chosen[:, places], chosen], 1)


def test_what_is_known_is_chosen_and_looked_up() -> None:
    torch.manual_seed(0)
    axes = {"input_0": {1: "S"}}
    check(Groups(), (torch.randn(1, 5),), (torch.randn(1, 9),), dynamic_axes=axes)
    numbers = torch.randn(1, 1), torch.randn(1, 1)
    check(ChosenByNumber(), (torch.randn(1, 5), *numbers), (torch.randn(1, 9), *numbers), dynamic_axes=axes)


class Masked(nn.Module):
    """Masks of which some say nothing, and one says all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones_like(x, dtype=torch.bool)
        positive = x > 0
        kept = positive & seen[:1] | ~seen
        return x * kept + torch.logical_or(seen, positive) + torch.logical_and(positive[:, :1], ~seen)


def test_masks_that_say_nothing_are_left_out() -> None:
    target = TractNNEF(dynamic_axes={"x": {1: "S"}}, check_io=False)
    graph = capture(Masked(), (torch.randn(2, 5, device="meta"),), target, ("x",), ("y",))
    logic = {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.logical_and.default, aten.logical_or.default}
    assert not any(op.target in logic for op in graph.ops)
    torch.manual_seed(0)
    check(Masked(), (torch.randn(2, 5),), (torch.randn(2, 9),), dynamic_axes={"input_0": {1: "S"}})

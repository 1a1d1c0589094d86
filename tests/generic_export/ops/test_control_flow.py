"""Branches and loops that torch.export captures: computed and selected, run over an axis, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from generic_export.errors import CaptureError
from tests.engine_check import check

AXES = {"input_0": {0: "N"}}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def left(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.up(x).relu() + 1, x.sum()

        def right(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.down(x).relu() - 1, x.mean()

        first, second = torch.cond(x.sum() > 0, left, right, (x,))
        return first * 2, second


def test_both_branches_are_computed_and_one_is_selected() -> None:
    x = torch.rand(3, 4)
    check(Branch(), (x,), (-x,), (torch.rand(5, 4),), dynamic_axes=AXES)


def test_branches_in_branches() -> None:
    def nested(x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 10, lambda x: x + 1, lambda x: x + 2, (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: x + 3, (x,))

    check(nested, (torch.ones(3),), (torch.ones(30),), (-torch.ones(3),), dynamic_axes=AXES)


class Leaky(nn.Module):
    """A running mean with its own decay, over the first axis."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(3))
        self.reverse = reverse

    def forward(self, x: torch.Tensor) -> Any:
        def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            after = state * self.decay + x
            return after, torch.nn.functional.gelu(after)

        return scan(step, torch.zeros(3), x, dim=0, reverse=self.reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_a_dynamic_axis(reverse: bool) -> None:
    text = check(Leaky(reverse), (torch.randn(5, 3),), (torch.randn(9, 3),), dynamic_axes=AXES)
    assert "tract_core_scan" in text
    assert text.count("fragment gelu_exact") == 1


def test_loops_that_depend_on_data_are_refused() -> None:
    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda x: x.sum() < 10, lambda x: (x + 1,), (x,))

    with pytest.raises(CaptureError, match=r"while_loop at .* has no NNEF form"):
        check(loop, (torch.zeros(3),))


@pytest.mark.parametrize("axes", [{}, AXES])
def test_loops_whose_tensors_grow_are_refused_with_the_line(axes: dict[str, dict[int, str]]) -> None:
    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, torch.cat([x, x[-1:]])), (torch.tensor(0), x))

    with pytest.raises(CaptureError, match=r"at test_control_flow\.py:\d+: a loop carries a tensor whose shape"):
        check(loop, (torch.zeros(3),), dynamic_axes=axes)


def test_branches_taken_by_a_size_are_captured_for_that_size_or_refused() -> None:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(CaptureError, match=r"cond at .* has no NNEF form"):
        check(by_size, (torch.zeros(3),), dynamic_axes=AXES)

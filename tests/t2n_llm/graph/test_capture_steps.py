"""What is told of a capture: a step for each layer, and when the rest begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from t2n_llm.graph.capture import CAPTURING, TRANSLATING, report_captures
from t2n_llm.reporter import LogReporter


class Told(LogReporter):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def stage(self, title: str) -> None:
        self.heard.append(title)

    def steps(self, done: int, total: int) -> None:
        self.heard.append(f"{done}/{total}")


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.heads[0](self.layers[0](x))  # a shared layer is one


ROWS = (torch.randn(2, 4),)


def test_each_layer_is_a_step_of_the_capture_that_runs_it() -> None:
    told = Told()
    with report_captures(told):
        Stack(3)(*ROWS)  # no capture
        torch.export.export(Stack(3), ROWS)
        torch.export.export(Stack(2), ROWS)
    Stack(3)(*ROWS)
    torch.export.export(Stack(3), ROWS)
    first, second = ["1/3", "2/3", "3/3"], ["1/2", "2/2"]
    assert told.heard == [CAPTURING, *first, TRANSLATING, CAPTURING, *second, TRANSLATING]


def test_a_capture_that_fails_is_followed_by_another() -> None:
    class Fails(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise TypeError(super().forward(x))

    told = Told()
    with report_captures(told):
        with pytest.raises(TypeError):
            torch.export.export(Fails(2), ROWS)
        torch.export.export(nn.Linear(4, 4), ROWS)
    assert told.heard == [CAPTURING, "1/2", "2/2", TRANSLATING]


def test_who_is_told_may_end_it() -> None:
    class Ends(Told):
        def stage(self, title: str) -> None:
            super().stage(title)
            raise KeyboardInterrupt

    told = Ends()
    with pytest.raises(KeyboardInterrupt), report_captures(told):
        pass
    torch.export.export(Stack(3), ROWS)
    assert told.heard == [CAPTURING]

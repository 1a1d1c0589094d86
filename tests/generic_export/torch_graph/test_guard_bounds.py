"""Bounds of sizes read from what torch.export refuses, and a relative shift behind strided convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from generic_export.torch_graph.guard_bounds import guard_bounds
from tests.engine_check import check

REFUSAL = (
    "Constraints violated (T)!\n"
    "  - Not all values of T = x.shape[2] in the specified range T <= 5000 satisfy the generated guard {}."
)


@pytest.mark.parametrize(
    ("guard", "bounds"),
    [
        ("((1 + 2*(((-1) + x.shape[2]) // 4)) % (1 + (((-1) + x.shape[2]) // 4))) != 0", {"T": {"min": 5}}),
        ("5 <= x.shape[2] and x.shape[2] <= 5000", {"T": {"min": 5, "max": 5000}}),
        ("torch.sym_float(400*x.shape[2]) <= 536870912.0", {"T": {"max": 1342177}}),
        ("x.shape[2] % 8 == 0", {}),
        ("x.shape[2] == 80", {}),
        ("__import__('os').getpid() > x.shape[2]", {}),
    ],
)
def test_what_a_refusal_says(guard: str, bounds: dict[str, dict[str, int]]) -> None:
    assert guard_bounds(REFUSAL.format(guard)) == bounds


class ShiftedFrames(nn.Module):
    """A Conformer's relative shift over frames that strided convolutions leave: false of a single frame alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(4, 4, 3, stride=2, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.second(self.first(x)).mT
        scores = frames @ torch.cat([frames, frames[:, 1:]], dim=1).mT
        batch, count, positions = scores.shape
        padded = nn.functional.pad(scores, (1, 0)).view(batch, positions + 1, count)
        return padded[:, 1:].view(batch, count, positions)[..., :count]


def test_a_relative_shift_of_strided_frames() -> None:
    axes = {"input_0": {0: "B", 2: "T"}}
    sizes = [(torch.randn(batch, 4, frames),) for batch, frames in ((2, 80), (1, 9), (3, 77), (2, 6))]
    check(ShiftedFrames().eval(), *sizes, dynamic_axes=axes)


def test_a_range_without_ends() -> None:
    said = "  - Not all values of B = x.shape[0] in the specified range satisfy the generated guard x.shape[0] <= 9999."
    assert guard_bounds(said) == {"B": {"max": 9999}}

"""Roundings of quotients of sizes are divisions of integers in the graph, and right in the engine."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

from generic_export.compat import torch_sympy
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from generic_export.torch_graph.sizes.proofs import is_zero_exactly, without_symbolic_divisors
from generic_export.torch_graph.sizes.ratios import whole_quotients
from tests.engine_check import check

LENGTH = {"input_0": {0: "B", 2: "T"}}


class SamePadding(nn.Module):
    """Convolutions that are padded to the size of their input by their stride, as TensorFlow does."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(3, 3, 3, stride=stride) for stride in strides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 3, ceil(T / strides)]."""
        for layer in self.layers:
            stride, size = layer.stride[0], x.shape[-1]
            missing = max((math.ceil(size / stride) - 1) * stride + 3 - size, 0)
            x = layer(F.pad(x, (missing // 2, missing - missing // 2)))
        return x


def test_padding_as_in_tensorflow() -> None:
    others = [(torch.randn(batch, 3, length),) for batch, length in ((1, 1), (3, 31), (2, 64), (1, 7))]
    graph = check(SamePadding((1, 2, 1, 2)).eval(), (torch.randn(2, 3, 48),), *others, dynamic_axes=LENGTH)
    assert "ceil" not in graph


@pytest.mark.parametrize(
    "cut",
    [
        lambda size: math.ceil(size / 3),
        lambda size: math.floor(size / 3),
        lambda size: math.ceil((size + 4) / 2) - 2,
        lambda size: math.ceil(size / 2.5),
    ],
)
def test_a_rounded_quotient(cut: Callable[[int], int]) -> None:
    others = [(torch.randn(2, 3, length),) for length in (3, 7, 30, 31, 32)]
    check(lambda x: x[..., : cut(x.shape[-1])] * 2, (torch.randn(2, 3, 20),), *others, dynamic_axes=LENGTH)


def test_sizes_do_not_grow_with_layers() -> None:
    tracer = TorchModuleTracer(
        SamePadding((2, 1) * 4).eval(), args=(torch.rand(2, 3, 64),), input_names=["x"], dynamic_axes={"x": {2: "T"}}
    )
    (output,) = tracer.trace().outputs
    assert len(str(output.shape[2])) < 60, output.shape


def test_rounding_is_put_back() -> None:
    before = torch.SymFloat.__ceil__, torch.SymFloat.__floor__
    with whole_quotients():
        assert torch.SymFloat.__ceil__ is not before[0]
    assert (torch.SymFloat.__ceil__, torch.SymFloat.__floor__) == before


class Windows(nn.Module):
    """Windows of 4 of a picture that is filled up, as in timm's Swin: the batch is `-1`, a quotient of products of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [B, H, W, 6]."""
        _, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
        rows, columns = x.shape[1] // 4, x.shape[2] // 4
        windows = x.view(-1, rows, 4, columns, 4, channels).transpose(2, 3).reshape(-1, 16, channels)
        joined = self.layer(windows).view(-1, rows, columns, 4, 4, channels).transpose(2, 3)
        return joined.reshape(-1, 4 * rows, 4 * columns, channels)[:, :height, :width]


def test_windows_of_pictures_of_any_size() -> None:
    sizes = ((2, 18, 21), (1, 16, 16), (3, 5, 30), (1, 30, 4))
    pictures = [(torch.randn(batch, height, width, 6),) for batch, height, width in sizes]
    check(Windows(), *pictures, dynamic_axes={"input_0": {0: "B", 1: "H", 2: "W"}})


@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_quotient_of_sizes_that_are_filled_up(step: int) -> None:
    b, h, w = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhw")
    halved = torch_sympy.FloorDiv(h + torch_sympy.Mod(h, 2), 2)
    for size in (h, torch_sympy.FloorDiv(h, 4), halved, h + 3):
        rows = size + torch_sympy.Mod(step - torch_sympy.Mod(size, step), step)
        columns = w - torch_sympy.Mod(w, step)
        windows = step**2 * b * torch_sympy.FloorDiv(rows, step) * torch_sympy.FloorDiv(columns, step)
        quotient = torch_sympy.FloorDiv(sympy.expand(windows), sympy.expand(rows * columns))
        assert without_symbolic_divisors(quotient) == b
        assert is_zero_exactly(sympy.expand(rows * columns * b - windows))

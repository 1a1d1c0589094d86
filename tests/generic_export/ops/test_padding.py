"""Padding in the engine, at the size it was exported with and at others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.engine_check import check

AXES = {"input_0": {0: "B", 2: "H", 3: "W"}}

PADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constant": lambda x: F.pad(x, (1, 2, 0, 3), value=1.5),
    "constant_channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "constant_minus_infinity": lambda x: F.pad(x, (1, 1), value=float("-inf")),
    "negative": lambda x: F.pad(x, (-1, 2, 1, -2)),
    "reflect": lambda x: F.pad(x, (2, 1, 3, 0), mode="reflect"),
    "reflect_and_crop": lambda x: F.pad(x, (2, -1, -1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1, 0, 4), mode="replicate"),
    "replicate_and_crop": lambda x: F.pad(x, (-2, 1, 0, -1), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1, 3, 3), mode="circular"),
    "circular_and_crop": lambda x: F.pad(x, (2, -1, 0, 3), mode="circular"),
    "to_a_multiple": lambda x: F.pad(x, (0, (-x.shape[3]) % 4, 0, (4 - x.shape[2] % 4) % 4)),
    "integers": lambda x: F.pad((x * 10).long(), (1, 1), value=3),
    "large_integers": lambda x: F.pad((x * 10).long(), (1, 1), value=2**40 + 1),
    "booleans": lambda x: F.pad(x > 0, (1, 2), value=True),
}


@pytest.mark.parametrize("name", PADS)
def test_pads_at_three_sizes(name: str) -> None:
    sample, *others = ((torch.randn(shape),) for shape in ((2, 3, 6, 7), (1, 3, 9, 5), (2, 3, 8, 8)))
    check(PADS[name], sample, *others, dynamic_axes=AXES)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant"])
def test_pads_up_to_a_multiple(mode: str) -> None:
    sizes = [(torch.randn(batch, 3, length),) for batch, length in ((2, 7), (1, 4), (3, 9), (2, 14))]
    check(lambda x: F.pad(x, (3, -x.shape[2] % 4), mode=mode), *sizes, dynamic_axes={"input_0": {0: "B", 2: "T"}})


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_one_and_three_dimensions(mode: str) -> None:
    check(lambda x: F.pad(x, (2, 1), mode=mode), (torch.randn(2, 3, 6),))
    check(lambda x: F.pad(x, (2, 1, 0, 1, 1, 0), mode=mode), (torch.randn(1, 2, 3, 4, 5),))


def _same(size: int, kernel: int, stride: int) -> int:
    """Return what TensorFlow's "same" padding adds to an axis."""
    return max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (5, 2), (7, 2), (3, 1), (4, 2)])
def test_same_padding_of_both_axes(kernel: int, stride: int) -> None:
    weight = torch.randn(2, 3, kernel, kernel)

    def padded(x: torch.Tensor) -> torch.Tensor:
        high, wide = (_same(size, kernel, stride) for size in x.shape[2:])
        x = F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        return F.conv2d(x, weight, stride=stride)

    samples = [(torch.randn(2, 3, high, wide),) for high, wide in ((9, 12), (10, 11), (12, 9), (15, 21))]
    check(padded, *samples, dynamic_axes=AXES)

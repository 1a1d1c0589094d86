"""One export, every size: sizes that slice, split, scale and index, in the engine at sizes other than the example's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generic_export.errors import SpecializedAxisError
from tests.engine_check import Function, check

Case = Callable[..., torch.Tensor]

LENGTH = {"input_0": {0: "B", 1: "T"}}

ANY_LENGTH: dict[str, Case] = {
    "divided by the root of the length": lambda x: x / math.sqrt(x.shape[1]),
    "divided by the length": lambda x: x.mean(1) * (1.0 / x.shape[1]),
    "scaled by a power of the length": lambda x: x * x.shape[1] ** -0.5,
    "the first half, rounded up": lambda x: x[:, : math.ceil(x.shape[1] / 2)],
    "linspace over the length": lambda x: torch.linspace(-1, 1, x.shape[1])[None, :, None] * x,
    "linspace up to the length": lambda x: torch.linspace(0, x.shape[1] - 1, x.shape[1]).view(1, -1, 1) + x,
    "integers times the length": lambda x: (torch.arange(x.shape[1]) * x.shape[1]).float()[None, :, None] + x,
    "part of a split": lambda x: x.split(x.shape[1] // 2 + 1, 1)[0],
    "at most four": lambda x: x[:, :4],
    "the last four": lambda x: x[:, -4:],
    "the third and fourth": lambda x: x[:, 2:4],
    "padded to windows": lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).mean(2),
}


def _halves_in_windows(x: torch.Tensor) -> torch.Tensor:
    """Blocks of four of every second position, their size asked back from the number of blocks."""
    halves = F.avg_pool1d(x.transpose(1, 2), 2, 2).transpose(1, 2)
    filled = F.pad(halves, (0, 0, 0, -halves.shape[1] % 4))
    blocks = filled.shape[1] // 4
    return filled.reshape(x.shape[0], blocks, filled.shape[1] // blocks, 8).mean(2)


ANY_LENGTH["halves in windows"] = _halves_in_windows


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_any_length(name: str) -> None:
    others = [(torch.randn(batch, length, 8),) for batch, length in ((1, 2), (1, 3), (3, 17))]
    check(ANY_LENGTH[name], (torch.randn(2, 9, 8),), *others, dynamic_axes=LENGTH)


WITH_PAST: dict[str, Case] = {
    "the new ones, counted from the end": lambda past, x: torch.cat([past, x], 1)[:, -x.shape[1] :],
    "all but as many as are new": lambda past, x: torch.cat([past, x], 1)[:, : -x.shape[1]],
    "shifted by one": lambda past, x: torch.cat([past, x], 1)[:, -x.shape[1] - 1 : -1],
    "the first new one": lambda past, x: torch.cat([past, x], 1)[:, -x.shape[1]],
    "narrow": lambda past, x: torch.cat([past, x], 1).narrow(1, past.shape[1], x.shape[1]),
}


@pytest.mark.parametrize("name", WITH_PAST)
def test_positions_counted_by_another_size(name: str) -> None:
    arguments = [(torch.randn(2, past, 3), torch.randn(2, new, 3)) for past, new in ((5, 3), (1, 2), (3, 3), (2, 9))]
    check(WITH_PAST[name], *arguments, dynamic_axes={"input_0": {1: "P"}, "input_1": {1: "T"}})


def test_windows_of_an_axis_that_is_a_multiple() -> None:
    arguments = [(torch.randn(batch, length, 8),) for batch, length in ((2, 8), (1, 4), (3, 12))]
    check(lambda x: x.view(x.shape[0], x.shape[1] // 4, 4, 8).sum(2), *arguments, dynamic_axes=LENGTH)


@pytest.mark.parametrize("module", [nn.PixelUnshuffle(2), nn.PixelShuffle(2)], ids=["unshuffle", "shuffle"])
def test_pixels_of_an_image_of_any_even_size(module: nn.Module) -> None:
    images = [(torch.randn(batch, 4, *sides),) for batch, *sides in ((1, 8, 8), (2, 10, 12))]
    check(module, *images, dynamic_axes={"input_0": {0: "B", 2: "H", 3: "W"}})


@pytest.mark.parametrize(
    "frozen",
    [lambda x: sum(x[:, place] for place in range(x.shape[1])), lambda x: x * math.log(x.shape[1])],
    ids=["loop over an axis", "logarithm"],
)
def test_what_pytorch_freezes_is_refused_with_its_line(frozen: Case) -> None:
    with pytest.raises(SpecializedAxisError, match=r"test_dynamic_sizes\.py:\d+: a dynamic axis is frozen"):
        check(Function(frozen), (torch.randn(2, 9, 8),), dynamic_axes=LENGTH)

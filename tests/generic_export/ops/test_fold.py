"""Patches, channel rearrangements and inactive dropouts in the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine_check import check

AXES = {"input_0": {0: "B", 2: "H", 3: "W"}}

REARRANGEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "unfold_strided": lambda x: F.unfold(x, (2, 3), dilation=(2, 1), stride=(2, 3)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "glu": lambda x: F.glu(x, 1),
    "unfold_and_fold": lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1),
}


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_rearrangements_at_two_sizes(name: str) -> None:
    sample, other = (torch.randn(2, 4, 6, 9),), (torch.randn(1, 4, 8, 7),)
    check(REARRANGEMENTS[name], sample, other, dynamic_axes=AXES)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((6, 8), {"kernel_size": 2, "stride": 2}),
        ((5, 7), {"kernel_size": 3, "padding": 1}),
        ((8, 9), {"kernel_size": (2, 3), "stride": (3, 2), "dilation": (1, 2)}),
    ],
)
def test_fold_sums_overlapping_patches(size: tuple[int, int], options: dict) -> None:
    blocks = F.unfold(torch.randn(2, 3, *size), **options)
    other = F.unfold(torch.randn(4, 3, *size), **options)
    check(lambda x: F.fold(x, size, **options), (blocks,), (other,), dynamic_axes={"input_0": {0: "B"}})


@pytest.mark.parametrize(
    "layer", [nn.Dropout(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]
)
def test_dropouts_do_nothing(layer: nn.Module) -> None:
    check(nn.Sequential(layer, nn.ReLU()).eval(), (torch.randn(2, 3, 4, 5),))

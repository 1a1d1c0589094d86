"""Interpolation and grid sampling in the engine, at the size they were exported with and at others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.engine_check import check

IMAGE_AXES = {"input_0": {0: "B", 2: "H", 3: "W"}}
LENGTH_AXES = {"input_0": {0: "B", 2: "L"}}
VOLUME_AXES = {"input_0": {0: "B", 2: "D", 3: "H", 4: "W"}}

INTERPOLATIONS: dict[str, dict[str, Any]] = {
    "nearest_twice": {"scale_factor": 2},
    "nearest_up": {"scale_factor": 1.5},
    "nearest_down": {"scale_factor": 0.5},
    "nearest_size": {"size": (10, 7)},
    "nearest_exact_twice": {"scale_factor": 2, "mode": "nearest-exact"},
    "nearest_exact_size": {"size": (10, 7), "mode": "nearest-exact"},
    "bilinear_twice": {"scale_factor": 2, "mode": "bilinear"},
    "bilinear_uneven": {"scale_factor": (1.5, 2), "mode": "bilinear"},
    "bilinear_recomputed": {"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": True},
    "bilinear_size": {"size": (10, 7), "mode": "bilinear"},
    "bilinear_aligned_twice": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    "bilinear_aligned_size": {"size": (10, 1), "mode": "bilinear", "align_corners": True},
    "bicubic_twice": {"scale_factor": 2, "mode": "bicubic"},
    "bicubic_down": {"scale_factor": 0.6, "mode": "bicubic"},
    "bicubic_aligned_size": {"size": (10, 7), "mode": "bicubic", "align_corners": True},
    "area_size": {"size": (3, 5), "mode": "area"},
}


@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_images_at_two_sizes(name: str) -> None:
    torch.manual_seed(0)
    options = INTERPOLATIONS[name]
    sample, other = (torch.randn(2, 3, 6, 8),), (torch.randn(1, 3, 9, 5),)
    check(lambda x: F.interpolate(x, **options), sample)
    check(lambda x: F.interpolate(x, **options), sample, other, dynamic_axes=IMAGE_AXES)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_to_the_size_of_another_tensor(mode: str) -> None:
    axes = {"input_0": {2: "H", 3: "W"}, "input_1": {2: "M", 3: "N"}}
    sample = (torch.randn(2, 3, 4, 5), torch.randn(2, 1, 9, 7))
    other = (torch.randn(2, 3, 6, 3), torch.randn(2, 1, 6, 11))
    check(lambda x, y: F.interpolate(x, size=y.shape[2:], mode=mode) + y, sample, other, dynamic_axes=axes)


def test_lengths_and_volumes() -> None:
    length, other = (torch.randn(2, 3, 7),), (torch.randn(1, 3, 12),)
    check(lambda x: F.interpolate(x, scale_factor=1.5, mode="linear"), length, other, dynamic_axes=LENGTH_AXES)
    check(lambda x: F.interpolate(x, scale_factor=3), length, other, dynamic_axes=LENGTH_AXES)
    volume, other = (torch.randn(1, 2, 3, 4, 5),), (torch.randn(2, 2, 5, 3, 4),)
    check(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), volume, other, dynamic_axes=VOLUME_AXES)
    check(lambda x: F.interpolate(x, size=(4, 6, 9), mode="trilinear"), volume)


def test_antialiased_downscaling() -> None:
    for mode in ("bilinear", "bicubic"):
        check(
            lambda x, mode=mode: F.interpolate(x, size=(5, 4), mode=mode, antialias=True), (torch.randn(1, 2, 11, 9),)
        )


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "wanted", [{"size": (5, 4)}, {"scale_factor": 0.5}, {"scale_factor": 2.0}, {"size": (40, 3)}], ids=str
)
def test_antialiased_at_dynamic_sizes(mode: str, wanted: dict[str, Any]) -> None:
    sizes = [(torch.randn(1, 2, height, width),) for height, width in ((4, 6), (23, 9), (64, 31), (5, 4))]
    axes = {"input_0": {2: "H", 3: "W"}}
    options = {**wanted, "mode": mode, "antialias": True}
    check(lambda x: F.interpolate(x, **options), (torch.randn(1, 2, 11, 8),), *sizes, dynamic_axes=axes)


GRID_SAMPLES = [
    {"mode": mode, "padding_mode": padding, "align_corners": aligned}
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for aligned in (False, True)
]


@pytest.mark.parametrize("options", GRID_SAMPLES, ids=str)
def test_grid_samples_inside_and_outside_the_image(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    axes = {"input_0": {2: "H", 3: "W"}, "input_1": {1: "M", 2: "N"}}
    sample = (torch.randn(2, 3, 6, 8), torch.rand(2, 5, 4, 2) * 3 - 1.5)
    other = (torch.randn(2, 3, 9, 5), torch.rand(2, 3, 6, 2) * 3 - 1.5)
    check(lambda x, grid: F.grid_sample(x, grid, **options), sample, other, dynamic_axes=axes)


def test_spatial_transformer() -> None:
    def transform(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, F.affine_grid(theta, [2, 3, 6, 8], align_corners=False), align_corners=False)

    check(transform, (torch.randn(2, 3, 6, 8), torch.randn(2, 2, 3)))

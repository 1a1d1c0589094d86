"""Pools in the engine, at the size they were exported with and at others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.engine_check import check

IMAGE_AXES = {"input_0": {0: "B", 2: "H", 3: "W"}}
LENGTH_AXES = {"input_0": {0: "B", 2: "L"}}
VOLUME_AXES = {"input_0": {0: "B", 2: "D", 3: "H", 4: "W"}}

Pool = Callable[[torch.Tensor], Any]

IMAGE_POOLS: dict[str, Pool] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max_padded": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_dilated": lambda x: F.max_pool2d(x, (2, 3), (1, 2), (1, 1), (2, 1)),
    "max_indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max_ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "avg": lambda x: F.avg_pool2d(x, 2),
    "avg_padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_padding_not_counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_ceil": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    "avg_ceil_padded": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_ceil_not_counted": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "lp": lambda x: F.lp_pool2d(x, 2.0, 3, 2),
}


@pytest.mark.parametrize("name", IMAGE_POOLS)
def test_image_pools_at_two_sizes(name: str) -> None:
    torch.manual_seed(0)
    sample, other = (torch.randn(2, 3, 9, 12),), (torch.randn(1, 3, 13, 8),)
    check(IMAGE_POOLS[name], sample, other, dynamic_axes=IMAGE_AXES)


# Whether their last window still starts inside the image depends on the size: PyTorch freezes the answer.
STATIC_POOLS: dict[str, Pool] = {
    "max_ceil_step_beyond_window": lambda x: F.max_pool2d(x, 1, 2, ceil_mode=True),
    "max_ceil_indices": lambda x: F.max_pool2d(x, 2, 2, 1, ceil_mode=True, return_indices=True),
    "avg_ceil_window_of_padding": lambda x: F.avg_pool2d(x, 2, 2, 1, ceil_mode=True),
    "max_ceil_at_both_ends": lambda x: F.max_pool2d(x, (2, 3), (3, 2), (1, 0), ceil_mode=True),
}


@pytest.mark.parametrize("name", STATIC_POOLS)
def test_pools_of_known_images(name: str) -> None:
    for shape in ((2, 3, 9, 12), (2, 3, 8, 7)):
        check(STATIC_POOLS[name], (torch.randn(shape),))


LENGTH_POOLS: dict[str, Pool] = {
    "max": lambda x: F.max_pool1d(x, 3, 2, 1),
    "max_indices": lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True),
    "avg": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "avg_ceil": lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True),
    "lp": lambda x: F.lp_pool1d(x, 3.0, 2),
    "adaptive_avg_uneven": lambda x: F.adaptive_avg_pool1d(x, 5),
    "adaptive_max_uneven": lambda x: F.adaptive_max_pool1d(x, 5, return_indices=True),
}


@pytest.mark.parametrize("name", LENGTH_POOLS)
def test_length_pools_at_two_sizes(name: str) -> None:
    sample, other = (torch.rand(2, 3, 12),), (torch.rand(1, 3, 17),)
    check(LENGTH_POOLS[name], sample, other, dynamic_axes=LENGTH_AXES)


VOLUME_POOLS: dict[str, Pool] = {
    "max": lambda x: F.max_pool3d(x, 2, padding=1),
    "max_indices": lambda x: F.max_pool3d(x, (2, 3, 1), 2, return_indices=True),
    "avg": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "adaptive_avg": lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)),
}


@pytest.mark.parametrize("name", VOLUME_POOLS)
def test_volume_pools_at_two_sizes(name: str) -> None:
    sample, other = (torch.randn(3, 2, 5, 6, 7),), (torch.randn(2, 2, 7, 5, 4),)
    check(VOLUME_POOLS[name], sample, other, dynamic_axes=VOLUME_AXES)


@pytest.mark.parametrize("size", [1, (3, 4), (5, 7), (2, 1)])
def test_adaptive_average_whatever_the_image(size: Any) -> None:
    torch.manual_seed(0)
    images = (torch.randn(2, 3, 9, 12),), (torch.randn(1, 3, 10, 11),)
    check(lambda x: F.adaptive_avg_pool2d(x, size), images[0])
    graph = check(lambda x: F.adaptive_avg_pool2d(x, size), *images, dynamic_axes=IMAGE_AXES)
    assert " slice(" not in graph  # tract's load takes minutes over the sizes of such windows


@pytest.mark.parametrize(
    "size",
    [
        lambda high, wide: (high // 2 + 1, 2 * wide),
        lambda high, wide: (torch.sym_max(high, 7), torch.sym_max(wide, 7)),
        lambda high, wide: (3, wide - 1),
    ],
    ids=["halved and doubled", "at least seven", "one of the two"],
)
def test_adaptive_average_to_a_size_that_follows_from_the_image(size: Callable[[int, int], tuple[int, int]]) -> None:
    torch.manual_seed(0)
    images = [(torch.randn(2, 3, high, wide),) for high, wide in ((9, 12), (10, 5), (4, 8))]
    check(lambda x: F.adaptive_avg_pool2d(x, size(*x.shape[2:])), *images, dynamic_axes=IMAGE_AXES)


def test_adaptive_average_of_a_known_axis_to_a_size_of_another() -> None:
    torch.manual_seed(0)
    samples = (torch.randn(3, 2, 9, 4),), (torch.randn(5, 2, 9, 4),)
    check(lambda x: F.adaptive_avg_pool2d(x, (x.shape[0] + 1, 3)), *samples, dynamic_axes={"input_0": {0: "B"}})


def test_adaptive_average_of_one_axis() -> None:
    check(lambda x: F.adaptive_avg_pool2d(x, (None, 5)), (torch.randn(2, 3, 9, 12),))


@pytest.mark.parametrize("size", [(3, 4), (4, 5), (1, 1)])
def test_adaptive_maximum_and_its_indices(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    images = (torch.randn(2, 3, 9, 12),), (torch.randn(1, 3, 10, 11),)
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), images[0])
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), *images, dynamic_axes=IMAGE_AXES)


def test_unbatched_images() -> None:
    for pool in (IMAGE_POOLS["max_indices"], IMAGE_POOLS["avg_padded"], lambda x: F.adaptive_avg_pool2d(x, 3)):
        check(pool, (torch.randn(3, 9, 12),))


def test_max_unpool_puts_values_back() -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, indices, 2)

    check(there_and_back, (torch.randn(2, 3, 8, 6),), (torch.randn(1, 3, 8, 6),), dynamic_axes={"input_0": {0: "B"}})


def test_f16_averages_do_not_overflow() -> None:
    check(lambda x: F.avg_pool2d(x, 3), (torch.full((1, 2, 6, 6), 3e4, dtype=torch.float16),), atol=32)


def test_gradients_of_a_maximum_go_where_it_came_from() -> None:
    x = torch.randn(1, 2, 4, 4)
    _, places = torch.nn.functional.max_pool2d(x, 2, return_indices=True)

    def backward(grad: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)

    check(backward, (torch.randn(1, 2, 2, 2), x, places))

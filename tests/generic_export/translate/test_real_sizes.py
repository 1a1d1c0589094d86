"""Products and quotients by sizes, one after another with a way around each: their load takes no time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

Block = Callable[[torch.Tensor], torch.Tensor]


def _means(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.mean(2, keepdim=True)) + x.mean(3, keepdim=True).relu() * x.mean((2, 3), keepdim=True)


def _products(x: torch.Tensor) -> torch.Tensor:
    height, width = x.shape[2:]
    return torch.tanh(x * height) + torch.sigmoid(x * width) * torch.tanh(x * (height * width))


def _quotients(x: torch.Tensor) -> torch.Tensor:
    height, width = x.shape[2:]
    return torch.tanh(x / height) + torch.sigmoid(x / (width - 0.5)) * torch.tanh(x / (height * width - 1))


BLOCKS: dict[str, Block] = {
    "means": _means,
    "products": _products,
    "quotients": _quotients,
    "variances": lambda x: torch.tanh(x) * torch.var(x, (2, 3), keepdim=True),
    "norms": lambda x: torch.group_norm(torch.group_norm(x, 2) + x.amax(3, keepdim=True), 1),
}


def _residual(block: Block) -> Block:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x + block(x))
        return x

    return forward


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_with_a_way_around(name: str) -> None:
    """tract takes a size in a product for a mask, and multiplies what it notes of masks where two ways meet."""
    torch.manual_seed(0)
    pictures = (torch.randn(2, 4, 7, 9),), (torch.randn(1, 4, 5, 300),)
    check(_residual(BLOCKS[name]), *pictures, dynamic_axes={"input_0": {0: "B", 2: "H", 3: "W"}}, atol=1e-4)


def test_products_in_half_precision() -> None:
    pictures = (torch.randn(1, 2, 7).half(),), (torch.randn(1, 2, 700).half(),)
    check(lambda x: x * x.shape[2], *pictures, dynamic_axes={"input_0": {2: "W"}}, rtol=1e-3)

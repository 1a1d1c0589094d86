"""Blocks as parameters: what they give is what an archive would hold, and gradient descent moves them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.algorithms import BUILT_IN
from quant.blocks import Q4Blocks
from quant.learned import LearnedBlocks


def _blocks(seed: int, rows: int, groups: int) -> Q4Blocks:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, groups, 32), generator=generator, dtype=torch.uint8)
    return Q4Blocks(q, torch.randn(rows, groups, generator=generator).to(torch.float16))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 4))
def test_they_begin_as_what_they_are_made_of(seed: int, rows: int, groups: int) -> None:
    blocks = _blocks(seed, rows, groups)
    learned = LearnedBlocks.of(blocks)
    assert torch.equal(learned.values(), blocks.dequantize())
    assert torch.equal(learned.blocks().q, blocks.q) and torch.equal(learned.blocks().d, blocks.d)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.floats(0.0, 30.0))
def test_wherever_they_move_the_values_are_those_of_blocks(seed: int, far: float) -> None:
    learned = LearnedBlocks.of(_blocks(seed, 3, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        learned.shares.add_(far * torch.randn(learned.shares.shape, generator=generator))
    blocks = learned.blocks()
    assert int(blocks.q.max()) <= 15 and bool(blocks.d.isfinite().all())
    torch.testing.assert_close(learned.values().detach(), blocks.dequantize(), rtol=1e-6, atol=1e-6)


def test_slopes_of_shares() -> None:
    learned = LearnedBlocks.of(_blocks(0, 2, 2))
    slope = torch.randn(2, 64)
    learned.values().backward(slope)
    shares = (slope * learned.blocks().dequantize()).unflatten(-1, (2, 32)).sum(-1, keepdim=True)
    torch.testing.assert_close(learned.shares.grad, shares, rtol=1e-4, atol=1e-4)


def test_scales_bring_outputs_nearer() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(16, 64), torch.randn(128, 64) @ torch.randn(64, 64) / 8
    learned = LearnedBlocks.of(BUILT_IN["min_max"].quantize(weight))

    def error() -> torch.Tensor:
        return (inputs @ (weight - learned.values()).T).square().mean()

    before = error().item()
    optimizer = torch.optim.Adam([learned.shares], lr=2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        error().backward()
        optimizer.step()
    assert error().item() < 0.95 * before

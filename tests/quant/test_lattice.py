"""Groups that already lie on a 16-level grid keep it, through f32, f16 and bf16 files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.blocks import GROUP, Q4Blocks
from quant.gptq import lattice_blocks
from quant.weighted_search import weighted_scale_search


def random_blocks(rows: int = 16, groups: int = 4, seed: int = 0) -> Q4Blocks:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, groups, GROUP), generator=generator, dtype=torch.uint8)
    d = (torch.randn(rows, groups, generator=generator) * 0.01).half()
    return Q4Blocks(q, d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dequantised_blocks_are_found_in_any_storage(dtype):
    values = random_blocks().dequantize()
    stored = values.to(dtype).float()
    blocks, found = lattice_blocks(stored)
    assert bool(found.all())
    again = blocks.dequantize()
    assert torch.equal(again.to(dtype).float(), stored) or dtype is not torch.float32
    limit = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}[dtype]
    assert bool(((again - values).abs() <= limit * values.abs()).all())


def test_bf16_noise_is_mostly_undone():
    values = random_blocks(rows=64).dequantize()
    blocks, _ = lattice_blocks(values.bfloat16().float())
    noise = (values.bfloat16().float() - values).square().sum()
    assert float((blocks.dequantize() - values).square().sum()) < 0.4 * float(noise)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-8, 7), min_size=GROUP, max_size=GROUP),
    st.floats(2.0**-10, 100.0, width=16),
    st.booleans(),
)
def test_any_levels_are_kept_exactly(levels, scale, negative):
    d = -scale if negative else scale
    weight = torch.tensor([levels], dtype=torch.float32) * d
    blocks, found = lattice_blocks(weight)
    assert bool(found.all())
    assert torch.equal(blocks.dequantize(), weight)


def test_seven_levels_up_from_minus_seven_belong_too():
    weight = torch.arange(-7, 8).repeat(3)[:GROUP].float().reshape(1, GROUP) * 0.03
    blocks, found = lattice_blocks(weight)
    assert bool(found.all())
    assert torch.allclose(blocks.dequantize(), weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize("shift", [0.5, 0.25, 3.3])
def test_a_shifted_grid_is_not_taken(shift):
    weight = (random_blocks().q.float() - 8 + shift).flatten(-2) * 0.01
    blocks, found = lattice_blocks(weight)
    assert not bool(found.any())
    assert bool((blocks.d == 0).all()) and bool((blocks.q == 8).all())


def test_ordinary_weights_are_on_no_grid():
    torch.manual_seed(0)
    assert not bool(lattice_blocks(torch.randn(256, 512).bfloat16().float())[1].any())


def test_only_the_groups_on_a_grid_are_replaced():
    torch.manual_seed(0)
    exact = random_blocks()
    weight = exact.dequantize()
    weight[:, GROUP : 2 * GROUP] = torch.randn(16, GROUP)
    importance = torch.rand(128)
    searched = weighted_scale_search(weight, importance)
    kept = weighted_scale_search(weight, importance, keep_grids=True)
    assert torch.equal(kept.d[:, 1], searched.d[:, 1]) and torch.equal(kept.q[:, 1], searched.q[:, 1])
    assert torch.equal(kept.dequantize()[:, 2 * GROUP :], weight[:, 2 * GROUP :])


def test_zero_groups_count_as_found():
    blocks, found = lattice_blocks(torch.zeros(2, 64))
    assert bool(found.all()) and not bool(blocks.dequantize().any())

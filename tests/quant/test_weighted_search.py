"""The scale search: never worse than the signed maximum, whatever the group looks like."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import WeightError
from quant.blocks import GROUP, Q4Blocks
from quant.weighted_search import nearest_levels, weighted_scale_search


def signed_maximum(weight: torch.Tensor) -> Q4Blocks:
    groups = weight.unflatten(-1, (-1, GROUP))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    d = (extreme / -8).clamp(-65504, 65504).half()
    return Q4Blocks(nearest_levels(weight, d), d)


def error(weight: torch.Tensor, blocks: Q4Blocks, importance: torch.Tensor) -> torch.Tensor:
    difference = (weight.double() - blocks.dequantize().double()).square() * importance.double()
    return difference.unflatten(-1, (-1, GROUP)).sum(-1)


WEIGHTS = {
    "gaussian": lambda: torch.randn(24, 128) * 0.02,
    "heavy_tailed": lambda: torch.distributions.StudentT(3.0).sample((24, 128)) * 0.02,
    "spiky": lambda: torch.randn(24, 128) * torch.where(torch.rand(24, 128) < 0.02, 50.0, 0.1),
    "one_sided": lambda: torch.rand(24, 128),
    "bfloat16": lambda: torch.randn(24, 128).bfloat16().float(),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("importance", ["uniform", "magnitude", "channels"])
def test_error_is_below_the_signed_maximum_in_every_group(kind, importance):
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    wanted = {"uniform": torch.ones(1), "magnitude": weight.abs(), "channels": torch.rand(128) ** 4}[importance]
    found = error(weight, weighted_scale_search(weight, wanted), wanted)
    plain = error(weight, signed_maximum(weight), wanted)
    assert bool((found <= plain * (1 + 1e-5) + 1e-30).all())
    assert float(found.sum()) < 0.95 * float(plain.sum())


def test_error_is_below_ggmls_own_blocks():
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(1)
    weight, importance = torch.randn(16, 256), torch.rand(256)
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    theirs = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)))
    ours = weighted_scale_search(weight, importance).dequantize()
    assert float(((ours - weight) ** 2 * importance).sum()) < 0.9 * float(((theirs - weight) ** 2 * importance).sum())


def test_a_heavy_channel_is_rounded_more_finely():
    torch.manual_seed(2)
    weight = torch.randn(200, GROUP)
    importance = torch.ones(GROUP)
    importance[5] = 1e4
    heavy = (weighted_scale_search(weight, importance).dequantize() - weight)[:, 5].square().mean()
    even = (weighted_scale_search(weight, torch.ones(GROUP)).dequantize() - weight)[:, 5].square().mean()
    assert float(heavy) < 0.25 * float(even)


values = st.one_of(
    st.just(0.0),
    st.floats(-(2.0**126), 2.0**126, width=32),
    st.floats(-1.0, 1.0, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(values, min_size=GROUP, max_size=GROUP), st.lists(st.floats(0, 1e6, width=32), min_size=32, max_size=32)
)
def test_any_finite_group_is_no_worse_than_the_signed_maximum(group, importance):
    weight, wanted = torch.tensor([group]), torch.tensor([importance])
    blocks = weighted_scale_search(weight, wanted)
    assert blocks.d.isfinite().all() and int(blocks.q.max()) <= 15
    counted = wanted if bool((wanted > 0).any()) else torch.ones_like(wanted)
    # Importance has a floor, relative to the largest of the group.
    counted = (counted / counted.max()).clamp(min=1e-12)
    slack = 1e-5 * float((weight.double().square() * counted.double()).sum())
    assert (
        float(error(weight, blocks, counted).sum())
        <= float(error(weight, signed_maximum(weight), counted).sum()) + slack
    )


def test_zero_groups_have_a_zero_scale_and_the_middle_level():
    blocks = weighted_scale_search(torch.zeros(2, 64), torch.ones(64))
    assert bool((blocks.d == 0).all()) and bool((blocks.q == 8).all())


@pytest.mark.parametrize("spike", [1.0, -1.0, 3e-6, -5e-7, 60000.0, 1e9, -1e30])
def test_a_single_spike(spike):
    weight = torch.zeros(1, GROUP)
    weight[0, 7] = spike
    result = weighted_scale_search(weight, weight.abs()).dequantize()
    reachable = math.copysign(min(abs(spike), 8 * 65504.0), spike)
    assert float(result[0, 7]) == pytest.approx(reachable, rel=0.1)
    assert int((result != 0).sum()) == 1


def test_importance_that_is_all_zero_counts_every_value():
    torch.manual_seed(3)
    weight = torch.randn(4, 64)
    assert torch.equal(
        weighted_scale_search(weight, torch.zeros(64)).q, weighted_scale_search(weight, torch.ones(64)).q
    )


def test_stacked_weights_and_importance_broadcast():
    torch.manual_seed(4)
    weight, importance = torch.randn(3, 5, 64), torch.rand(3, 1, 64)
    together = weighted_scale_search(weight, importance)
    assert together.q.shape == (3, 5, 2, 32) and together.d.shape == (3, 5, 2)
    for index in range(3):
        assert torch.equal(together.q[index], weighted_scale_search(weight[index], importance[index]).q)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(bad):
    weight = torch.ones(1, GROUP)
    weight[0, 3] = bad
    with pytest.raises(WeightError, match="inf or NaN"):
        weighted_scale_search(weight, torch.ones(GROUP))
    with pytest.raises(WeightError, match="importance"):
        weighted_scale_search(torch.ones(1, GROUP), weight.abs() if bad == bad else weight)


def test_negative_importance_is_refused():
    with pytest.raises(WeightError, match="not negative"):
        weighted_scale_search(torch.ones(1, GROUP), torch.full((GROUP,), -1.0))

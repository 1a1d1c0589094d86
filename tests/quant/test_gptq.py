"""Error compensation on the deployed grid: the error of the outputs falls, whatever the Hessian looks like."""

import pytest
import torch

from generic_export.errors import WeightError
from quant.blocks import GROUP, ZERO_POINT, Q4Blocks
from quant.gptq import GptqQuantizer, damp, descend, output_power
from quant.imatrix import ImatrixQuantizer, StatisticsAccumulator
from quant.protocol import InputStatistics, Quantizer
from tests.quant.test_weighted_search import signed_maximum


def correlated(channels: int = 128, tokens: int = 2000, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(channels, channels, generator=generator) * torch.rand(channels, generator=generator) ** 2
    noise = torch.randn(tokens, channels, generator=generator)
    return torch.randn(tokens, channels, generator=generator) @ mixing / channels**0.5 + 0.1 * noise


def observed(inputs: torch.Tensor) -> InputStatistics:
    accumulator = StatisticsAccumulator(inputs.shape[-1], with_hessian=True)
    for piece in inputs.chunk(3):
        accumulator.add(piece)
    return accumulator.statistics()


def held_out_error(weight: torch.Tensor, blocks: Q4Blocks) -> float:
    return float(((weight - blocks.dequantize()) @ correlated(seed=0, tokens=3000)[2000:].T).square().mean())


@pytest.mark.parametrize("seed", [0, 1])
def test_each_algorithm_beats_the_one_before_on_inputs_not_seen(seed):
    torch.manual_seed(seed)
    weight, statistics = torch.randn(48, 128) * 0.05, observed(correlated(tokens=3000)[:2000])
    plain = held_out_error(weight, signed_maximum(weight))
    imatrix = held_out_error(weight, ImatrixQuantizer().quantize(weight, statistics))
    compensated = held_out_error(weight, GptqQuantizer(sweeps=0).quantize(weight, statistics))
    descended = held_out_error(weight, GptqQuantizer().quantize(weight, statistics))
    assert imatrix < 0.9 * plain
    assert compensated < 0.8 * imatrix
    assert descended < compensated


def test_static_scales_are_the_imatrix_ones_without_sweeps():
    torch.manual_seed(0)
    weight, statistics = torch.randn(8, 128), observed(correlated())
    ours, search = (q.quantize(weight, statistics) for q in (GptqQuantizer(sweeps=0), ImatrixQuantizer()))
    assert torch.equal(ours.d, search.d)
    assert not torch.equal(ours.q, search.q)


def test_uncorrelated_inputs_leave_nothing_to_compensate():
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    statistics = InputStatistics(torch.ones(64), 1000, torch.eye(64))
    ours, search = (q.quantize(weight, statistics) for q in (GptqQuantizer(sweeps=0), ImatrixQuantizer()))
    assert torch.equal(ours.q, search.q)


def test_a_sweep_never_raises_the_error():
    torch.manual_seed(0)
    weight, statistics = torch.randn(16, 128), observed(correlated())
    hessian = damp(statistics.hessian, 0.01)
    damped = InputStatistics(hessian.diagonal(), 1, hessian)
    first, before = signed_maximum(weight), float("inf")
    for sweeps in range(4):
        levels, scales = first.q.flatten(1).T.float() - ZERO_POINT, first.d.T.float().contiguous()
        descend(weight.T.contiguous(), levels, scales, hessian, sweeps)
        assert levels.min() >= -ZERO_POINT and levels.max() < ZERO_POINT
        assert torch.equal(levels, levels.round()) and torch.equal(scales, scales.half().float())
        now = output_power(weight - (levels.unflatten(0, (-1, GROUP)) * scales.unsqueeze(1)).flatten(0, 1).T, damped)
        assert now <= before * (1 + 1e-6)
        before = now
    assert before < 0.8 * output_power(weight - first.dequantize(), damped)


def test_a_grid_is_kept_exactly():
    torch.manual_seed(0)
    q = torch.randint(0, 16, (8, 4, GROUP), dtype=torch.uint8)
    weight = Q4Blocks(q, (torch.randn(8, 4) * 0.01).half()).dequantize()
    statistics = observed(correlated())
    assert torch.equal(GptqQuantizer().quantize(weight, statistics).dequantize(), weight)
    weight[:, :GROUP] = torch.randn(8, GROUP)
    assert torch.equal(GptqQuantizer().quantize(weight, statistics).dequantize()[:, GROUP:], weight[:, GROUP:])


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_fewer_tokens_than_channels(tokens):
    torch.manual_seed(0)
    weight, statistics = torch.randn(8, 128), observed(correlated(tokens=tokens))
    blocks = GptqQuantizer().quantize(weight, statistics)
    assert blocks.d.isfinite().all()
    plain = output_power(weight - ImatrixQuantizer().quantize(weight, statistics).dequantize(), statistics)
    assert output_power(weight - blocks.dequantize(), statistics) < plain


def test_shrinking_correlations_helps_when_tokens_are_few():
    torch.manual_seed(0)
    weight, statistics = torch.randn(48, 128) * 0.05, observed(correlated(tokens=3000)[:150])
    believed = held_out_error(weight, GptqQuantizer(shrinkage=0.0).quantize(weight, statistics))
    shrunk = held_out_error(weight, GptqQuantizer().quantize(weight, statistics))
    assert shrunk < 0.9 * believed


def test_channels_that_are_never_active():
    torch.manual_seed(0)
    inputs = correlated()
    inputs[:, 10:20] = 0
    weight = torch.randn(8, 128)
    values = GptqQuantizer().quantize(weight, observed(inputs)).dequantize()
    assert values.isfinite().all()
    assert float((values - weight).abs().max()) < float(weight.abs().max()) / 4


def test_a_hessian_that_is_not_definite_is_damped_more():
    torch.manual_seed(0)
    hessian = torch.ones(64, 64)
    hessian[0, 1] = hessian[1, 0] = 1.5
    blocks = GptqQuantizer(damping=0.0).quantize(torch.randn(4, 64), InputStatistics(torch.ones(64), 10, hessian))
    assert blocks.d.isfinite().all()


def test_zero_weights_and_stacked_weights():
    statistics = observed(correlated(64))
    assert not GptqQuantizer().quantize(torch.zeros(3, 64), statistics).dequantize().any()
    torch.manual_seed(0)
    stacked = torch.randn(2, 3, 64)
    blocks = GptqQuantizer().quantize(stacked, statistics)
    assert blocks.q.shape == (2, 3, 2, 32)
    assert torch.equal(blocks.q[1], GptqQuantizer().quantize(stacked[1], statistics).q)


def test_statistics_that_do_not_belong_are_refused():
    statistics = observed(correlated(64))
    with pytest.raises(WeightError, match="32 input channels"):
        GptqQuantizer().quantize(torch.ones(4, 32), statistics)
    with pytest.raises(WeightError, match="32 input channels"):
        ImatrixQuantizer().quantize(torch.ones(4, 32), statistics)
    bad = InputStatistics(torch.ones(32), 5, torch.full((32, 32), torch.nan))
    with pytest.raises(WeightError, match="inf or NaN"):
        GptqQuantizer().quantize(torch.randn(4, 32), bad)


def test_without_statistics_it_is_the_search():
    torch.manual_seed(0)
    weight = torch.randn(4, 64)
    assert isinstance(GptqQuantizer(), Quantizer) and isinstance(ImatrixQuantizer(), Quantizer)
    assert torch.equal(GptqQuantizer().quantize(weight).q, ImatrixQuantizer().quantize(weight).q)


def textbook_levels(weight: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """GPTQ as it is published: errors passed on by the upper Cholesky factor of the inverse, the largest diagonal first."""
    order = torch.argsort(hessian.diagonal(), descending=True)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order].double()), upper=True)
    pending, scale_of = weight[:, order].double(), scales.repeat_interleave(GROUP, dim=1)[:, order].double()
    levels = torch.empty_like(pending)
    for k in range(len(order)):
        levels[:, k] = (pending[:, k] / scale_of[:, k]).round().clamp(-ZERO_POINT, ZERO_POINT - 1)
        error = (pending[:, k] - levels[:, k] * scale_of[:, k]) / factor[k, k]
        pending[:, k + 1 :] -= error.unsqueeze(1) * factor[k, k + 1 :]
    natural = torch.empty_like(levels)
    natural[:, order] = levels
    return natural


@pytest.mark.parametrize("channels", [32, 96, 128])
def test_compensation_without_an_inverse_chooses_what_gptq_chooses(channels):
    torch.manual_seed(0)
    weight, statistics = torch.randn(40, channels), observed(correlated(channels))
    quantizer = GptqQuantizer(sweeps=0, shrinkage=0.0)
    blocks = quantizer.quantize(weight, statistics)
    hessian = damp(statistics.hessian.clone(), quantizer.damping)
    expected = textbook_levels(weight, blocks.d.float(), hessian)
    assert (blocks.q.flatten(1).float() - ZERO_POINT == expected).float().mean() > 0.995

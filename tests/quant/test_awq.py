"""Channel factors: searched on the deployed grid, and only taken when they lower the error of the outputs."""

import torch

from quant.awq import scaled_statistics, search_factors
from quant.gptq import output_power
from quant.imatrix import ImatrixQuantizer, StatisticsAccumulator
from quant.protocol import InputStatistics


def uneven_inputs(tokens: int = 1000, channels: int = 128) -> torch.Tensor:
    """A few channels are far stronger than the rest, as in every language model."""
    generator = torch.Generator().manual_seed(0)
    strength = torch.rand(channels, generator=generator) * 0.2 + 0.1
    strength[::17] *= 30
    return torch.randn(tokens, channels, generator=generator) * strength


def observed(inputs: torch.Tensor, hessian: bool = True) -> InputStatistics:
    accumulator = StatisticsAccumulator(inputs.shape[-1], hessian)
    accumulator.add(inputs)
    return accumulator.statistics()


def test_scaling_strong_channels_lowers_the_error_of_the_outputs():
    torch.manual_seed(0)
    weight, statistics = torch.randn(32, 128), observed(uneven_inputs())
    found = search_factors([weight], statistics)
    assert found.helps and float(found.factors[0]) > float(found.factors[1])
    light = scaled_statistics(statistics, found.factors)
    values = ImatrixQuantizer().quantize(weight * found.factors, light).dequantize() / found.factors
    plain = ImatrixQuantizer().quantize(weight, statistics).dequantize()
    assert output_power(weight - values, statistics) < 0.8 * output_power(weight - plain, statistics)


def test_the_reported_errors_are_the_real_ones():
    torch.manual_seed(0)
    weight, statistics = torch.randn(32, 128), observed(uneven_inputs())
    found = search_factors([weight], statistics, exponents=(0.3,))
    light = scaled_statistics(statistics, found.factors)
    values = ImatrixQuantizer().quantize(weight * found.factors, light).dequantize() / found.factors
    torch.testing.assert_close(found.error, output_power(weight - values, statistics), rtol=1e-4, atol=0)
    plain = ImatrixQuantizer().quantize(weight, statistics).dequantize()
    torch.testing.assert_close(found.plain_error, output_power(weight - plain, statistics), rtol=1e-4, atol=0)


def test_even_channels_are_left_alone():
    torch.manual_seed(0)
    statistics = InputStatistics(torch.ones(64), 100, torch.eye(64))
    found = search_factors([torch.randn(16, 64)], statistics)
    assert not found.helps
    assert torch.equal(found.factors, torch.ones(64))


def test_channels_of_one_source_share_a_factor():
    torch.manual_seed(0)
    statistics = observed(uneven_inputs())
    sources = (torch.arange(4).repeat_interleave(32) // 2) * 32 + torch.arange(128) % 32
    found = search_factors([torch.randn(32, 128)], statistics, sources=sources)
    assert found.factors.shape == (64,)
    assert found.helps


def test_dead_channels_and_dead_inputs():
    torch.manual_seed(0)
    inputs = uneven_inputs()
    inputs[:, 3] = 0
    found = search_factors([torch.randn(32, 128)], observed(inputs, hessian=False))
    assert found.factors.isfinite().all() and float(found.factors.min()) > 0
    silent = search_factors([torch.randn(32, 128)], observed(torch.zeros(5, 128)))
    assert not silent.helps


def test_statistics_of_divided_inputs():
    inputs, factors = uneven_inputs(), torch.rand(128) + 0.5
    expected = observed(inputs / factors)
    scaled = scaled_statistics(observed(inputs), factors)
    torch.testing.assert_close(scaled.mean_square, expected.mean_square, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scaled.hessian, expected.hessian, rtol=1e-4, atol=1e-4)

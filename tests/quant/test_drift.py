"""Weights that make up for altered inputs: nearer to the true outputs, and untouched where nothing was altered."""

import pytest
import torch

from quant.gptq import DriftAccumulator


def inputs(tokens: int, channels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(channels)
    mixing = torch.randn(channels, channels, generator=generator) / channels**0.5
    return torch.randn(tokens, channels, generator=generator) @ mixing


def paired(altered: torch.Tensor, true: torch.Tensor, batch: int = 100) -> DriftAccumulator:
    pairs = DriftAccumulator(true.shape[-1])
    for start in range(0, len(true), batch):
        pairs.add(altered[start : start + batch].unsqueeze(0), true[start : start + batch].unsqueeze(0))
    return pairs


@pytest.mark.parametrize("channels", [32, 96])
def test_outputs_of_altered_inputs_come_nearer_to_the_true_ones(channels: int) -> None:
    torch.manual_seed(0)
    true, weight = inputs(4000, channels), torch.randn(24, channels)
    altered = true @ (torch.eye(channels) + 0.1 * torch.randn(channels, channels)) + 0.05 * torch.randn_like(true)
    corrected = paired(altered[:3000], true[:3000]).corrected(weight)
    wanted = true[3000:] @ weight.T  # of tokens that nothing was learned from
    before = (altered[3000:] @ weight.T - wanted).square().sum()
    after = (altered[3000:] @ corrected.T - wanted).square().sum()
    assert float(after) < 0.3 * float(before)


def test_with_many_tokens_and_no_ridge_it_is_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    true, weight = inputs(64000, 32), torch.randn(8, 32)
    altered = true + 0.3 * torch.randn_like(true)
    solution = torch.linalg.lstsq(altered, true @ weight.T).solution.T
    torch.testing.assert_close(paired(altered, true, 8000).corrected(weight, ridge=0.0), solution, rtol=0, atol=2e-2)
    assert float((solution - weight).abs().max()) > 0.2


def test_few_tokens_change_less_than_many() -> None:
    torch.manual_seed(0)
    true, weight = inputs(64000, 32), torch.randn(8, 32)
    altered = true + 0.3 * torch.randn_like(true)
    few, many = (
        float((paired(altered[:count], true[:count]).corrected(weight, ridge=0.0) - weight).norm())
        for count in (40, 64000)
    )
    assert few < 0.9 * many


def test_a_weight_whose_inputs_are_the_true_ones_stays_bit_for_bit() -> None:
    true, weight = inputs(300, 64), torch.randn(8, 64)
    pairs = paired(true, true)
    assert torch.equal(pairs.corrected(weight), weight)
    torch.testing.assert_close(pairs.statistics().hessian, true.T @ true / len(true))

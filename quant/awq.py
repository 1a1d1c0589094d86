"""Scaling input channels so that those that matter are rounded more finely.

In: the weights that read one set of channels, and the statistics of these. Out: a factor for each channel; weights are
multiplied by it and whatever produces the channels is divided by it, so that nothing changes but the rounding. The
factors are searched on the deployed grid: groups of 32, sixteen levels. (Lin et al. 2023, "AWQ", arXiv:2306.00978.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quant.gptq import output_power
from quant.imatrix import ImatrixQuantizer
from quant.protocol import InputStatistics, Quantizer

DEFAULT_EXPONENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
_SAMPLED_ROWS = 256  # of each weight; enough to rank exponents
_LARGEST_FACTOR = 64.0  # either way, so that a norm's gain or a row stays well inside float16


@dataclass(frozen=True)
class ChannelFactors:
    """What a search found.

    Attributes:
        factors: float32 [S], positive, one for each source channel; all ones when no scaling helps.
        error: summed squared output error with them, on the rows sampled.
        plain_error: the same without.
    """

    factors: torch.Tensor
    error: float
    plain_error: float

    @property
    def helps(self) -> bool:
        """Whether the scaling lowers the error."""
        return self.error < self.plain_error


def search_factors(
    weights: Sequence[torch.Tensor],
    statistics: InputStatistics,
    *,
    sources: torch.Tensor | None = None,
    exponents: Sequence[float] = DEFAULT_EXPONENTS,
    quantizer: Quantizer | None = None,
) -> ChannelFactors:
    """Search factors of the form E[x^2]^(a/2), the exponent a chosen by the output error after rounding.

    Args:
        weights: float32 [N, K] each, all reading the same K channels.
        statistics: of these channels; with a Hessian the error is tr(R H R^T), without it sum(R^2 E[x^2]).
        sources: int64 [K], which source channel each of the K comes from (heads that share a value head), or None when
            each is its own.
        exponents: what to try besides 0.
        quantizer: rounds while searching; the imatrix search when None.
    """
    quantizer = quantizer or ImatrixQuantizer()
    rows = torch.cat([_sampled(weight) for weight in weights])
    strength = _source_strength(statistics.mean_square, sources)
    plain = _error(rows, torch.ones(rows.shape[1]), statistics, quantizer)
    best = ChannelFactors(torch.ones_like(strength), plain, plain)
    for exponent in exponents:
        factors = _centred(strength**exponent)
        error = _error(rows, factors if sources is None else factors[sources], statistics, quantizer)
        if error < best.error:
            best = ChannelFactors(factors, error, plain)
    return best


def scaled_statistics(statistics: InputStatistics, factors: torch.Tensor) -> InputStatistics:
    """Return the statistics of inputs [K] that were divided by `factors` [K]."""
    hessian = statistics.hessian
    if hessian is not None:
        hessian = (hessian / factors.unsqueeze(0)).div_(factors.unsqueeze(1))
    return replace(statistics, mean_square=statistics.mean_square / factors.square(), hessian=hessian)


def _sampled(weight: torch.Tensor) -> torch.Tensor:
    step = max(1, -(-len(weight) // _SAMPLED_ROWS))
    return weight.detach().to(torch.float32)[::step]


def _source_strength(mean_square: torch.Tensor, sources: torch.Tensor | None) -> torch.Tensor:
    """Return the root mean square of each source channel, float32 [S]."""
    if sources is None:
        return mean_square.sqrt()
    count = int(sources.max()) + 1
    total = torch.zeros(count).index_add_(0, sources, mean_square)
    uses = torch.zeros(count).index_add_(0, sources, torch.ones_like(mean_square))
    return (total / uses.clamp(min=1)).sqrt()


def _centred(factors: torch.Tensor) -> torch.Tensor:
    """Return the factors with a geometric middle of 1, inside the allowed range; dead channels get the smallest."""
    alive = factors[factors > 0]
    if not len(alive):
        return torch.ones_like(factors)
    middle = (alive.max() * alive.min()).sqrt()
    return (factors / middle).clamp_(1 / _LARGEST_FACTOR, _LARGEST_FACTOR)


def _error(rows: torch.Tensor, factors: torch.Tensor, statistics: InputStatistics, quantizer: Quantizer) -> float:
    light = InputStatistics(statistics.mean_square / factors.square(), statistics.tokens)
    residual = rows - quantizer.quantize(rows * factors, light).dequantize() / factors
    return output_power(residual, statistics)

"""The regularised incomplete gamma functions, in f64: a series for small shapes below x = a + 1, an integral elsewhere.

Series: Abramowitz & Stegun 6.5.29. The integrals of t^(a-1) exp(-t) reach over twelve standard deviations (sqrt(a)) and thirty
more, beyond which nothing is left in f32; their places are those of the tanh-sinh rule (Takahasi & Mori, 1974).
"""

from __future__ import annotations

import math

import torch

from generic_export.ops.special import back_to, in_double
from generic_export.torch_graph.decompose.rewrites import rewrites

aten = torch.ops.aten
Tensor = torch.Tensor

_TERMS = 96  # of the series, for a up to 20 and x up to a + 1: 1e-20
_SERIES_UP_TO = 20.0
_STEP, _REACH = 0.05, 70  # of the tanh-sinh rule: 141 places, the outermost 1e-22 from the ends


def _shares(self: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower share where it is the computed one, the upper where that is, and which of them is."""
    a, x = torch.broadcast_tensors(in_double(self), in_double(other))
    proper = (a > 0) & (x > 0) & torch.isfinite(a) & torch.isfinite(x)
    a, x = torch.where(proper, a, 1.0), torch.where(proper, x, 1.0)
    below = x < a + 1.0
    reach = 12.0 * torch.sqrt(a) + 30.0
    start = torch.where(below, torch.clamp(x - reach, min=0.0), x)
    end = torch.where(below, x, x + reach)
    share = torch.where(below & (a < _SERIES_UP_TO), _series(a, x), _integral(a, start, end))
    return share, below, proper


def _series(a: Tensor, x: Tensor) -> Tensor:
    """x^a exp(-x) / Gamma(a + 1) times the sum of x^n / ((a + 1) ... (a + n))."""
    orders = torch.arange(1, _TERMS + 1, dtype=torch.float64)
    # Where this is not the wanted branch, x is what does no harm.
    small = torch.minimum(x, a + 1.0)
    logarithms = torch.cumsum(torch.log(small.unsqueeze(-1) / (a.unsqueeze(-1) + orders)), dim=-1)
    total = 1.0 + torch.exp(logarithms).sum(-1)
    return torch.exp(a * torch.log(x) - x - torch.lgamma(a + 1.0)) * total


def _integral(a: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The integral of t^(a-1) exp(-t) / Gamma(a) between two bounds."""
    at = torch.arange(-_REACH, _REACH + 1, dtype=torch.float64) * _STEP
    bent = math.pi / 2 * torch.sinh(at)
    weights = _STEP * math.pi / 2 * torch.cosh(at) / torch.square(torch.cosh(bent))
    # 1 + tanh, without cancellation near the lower end.
    half = ((end - start) * 0.5).unsqueeze(-1)
    places = start.unsqueeze(-1) + half * (2.0 / (1.0 + torch.exp(-2.0 * bent)))
    wide = a.unsqueeze(-1)
    heights = torch.exp((wide - 1.0) * torch.log(places) - places - torch.lgamma(wide))
    return (heights * weights).sum(-1) * half.squeeze(-1)


def _limits(result: Tensor, self: Tensor, other: Tensor, proper: Tensor, *, full: float) -> Tensor:
    """Fill in what lies at and beyond the ends: `full` is the value where all of the distribution lies below x."""
    a, x = torch.broadcast_tensors(in_double(self), in_double(other))
    none = 1.0 - full
    at_the_ends = torch.where((a == 0) | torch.isinf(x), full, none)
    improper = (
        (a < 0) | (x < 0) | torch.isnan(a) | torch.isnan(x) | ((a == 0) & (x == 0)) | (torch.isinf(a) & torch.isinf(x))
    )
    return torch.where(proper, result, torch.where(improper, math.nan, at_the_ends))


@rewrites(aten.igamma.default)
def igamma(self: Tensor, other: Tensor) -> Tensor:
    """The share of the gamma distribution of shape `self` below `other`."""
    share, below, proper = _shares(self, other)
    return back_to(_limits(torch.where(below, share, 1.0 - share), self, other, proper, full=1.0), self, other)


@rewrites(aten.igammac.default)
def igammac(self: Tensor, other: Tensor) -> Tensor:
    """The share of the gamma distribution of shape `self` above `other`."""
    share, below, proper = _shares(self, other)
    return back_to(_limits(torch.where(below, 1.0 - share, share), self, other, proper, full=0.0), self, other)

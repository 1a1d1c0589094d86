"""Recursive filters are loops of the graph: what torchaudio computes, at any length."""

from __future__ import annotations

import pytest
import torch

from generic_export.torch_graph.decompose.patches import filtered
from tests.engine_check import check

AXES = {"input_0": {0: "B", 2: "T"}}


def _by_hand(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x, y = x.double(), torch.zeros_like(x, dtype=torch.float64)
    for t in range(x.shape[2]):
        for k in range(a.shape[1]):
            if t >= k:
                y[:, :, t] += b[:, k] * x[:, :, t - k]
                if k:
                    y[:, :, t] -= a[:, k] * y[:, :, t - k]
        y[:, :, t] /= a[:, 0]
    return y.float()


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_the_difference_equation(order: int) -> None:
    generator = torch.Generator().manual_seed(order)
    a = torch.cat([torch.full((2, 1), 2.0), torch.rand(2, order, generator=generator) * 0.5], 1)
    b = torch.randn(2, order + 1, generator=generator)
    sizes = [(torch.randn(batch, 2, length, generator=generator),) for batch, length in ((2, 40), (1, 2), (3, 57))]
    for (x,) in sizes:
        torch.testing.assert_close(filtered(x, a, b), _by_hand(x, a, b), rtol=1e-5, atol=1e-5)
    check(lambda x: filtered(x, a, b), *sizes, dynamic_axes=AXES)


def test_torchaudio_says_the_same() -> None:
    pytest.importorskip("torchaudio", reason="torchaudio is not installed (the extra zoo).")
    from torchaudio.functional import biquad, deemphasis

    sizes = [(torch.randn(batch, 3, length),) for batch, length in ((2, 100), (1, 9), (3, 131))]
    check(lambda x: deemphasis(x) + biquad(x, 0.2, 0.3, 0.2, 1.0, -0.4, 0.1), *sizes, dynamic_axes=AXES)

"""Hurwitz' zeta function and Airy's, poles and negative arguments among them."""

from __future__ import annotations

import mpmath
import torch

from generic_export.ops.zeta import airy_ai
from tests.engine_check import check

ORDERS = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 7.0, 12.5, 30.0])
STARTS = torch.tensor([-20.5, -3.7, -2.0, -0.5, 0.0, 0.1, 1.0, 2.5, 20.0, 300.0])


def test_zeta() -> None:
    grid = tuple(values.flatten() for values in torch.meshgrid(ORDERS, STARTS, indexing="ij"))
    check(torch.special.zeta, grid, rtol=1e-5)
    check(lambda x: (torch.special.zeta(x, 2.0), torch.special.zeta(3.0, x)), (ORDERS,), rtol=1e-5)


def test_airy() -> None:
    places = torch.linspace(-30.0, 30.0, 301)
    check(torch.special.airy_ai, (places,), rtol=1e-3, atol=2e-6)  # PyTorch's own error at -2.2 is 1.6e-6
    x = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64)
    exact = torch.tensor([float(mpmath.airyai(float(value))) for value in x], dtype=torch.float64)
    torch.testing.assert_close(airy_ai(x), exact, atol=1e-8, rtol=1e-6)

"""Special functions: the rewrites against PyTorch over a wide range, then a few of them in the engine."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from generic_export.errors import TranslationError
from generic_export.torch_graph.decompose.rewrites import REWRITES
from tests.engine_check import check

aten = torch.ops.aten

WIDE = torch.cat([torch.linspace(-12.03, 12.07, 400), torch.tensor([1e-6, -1e-6, 0.0, 1e-3, 30.0, -30.0])])
OPEN = torch.linspace(-0.9999, 0.9999, 301)
POSITIVE = torch.linspace(1e-3, 40, 400)

# Relative error allowed; PyTorch's own f32 results are no better than 1e-6 near zeros.
UNARY: dict[OpOverload, tuple[torch.Tensor, float]] = {
    aten.expm1.default: (WIDE, 1e-6),
    aten.log1p.default: (torch.cat([OPEN, POSITIVE]), 1e-6),
    aten.exp2.default: (WIDE, 1e-6),
    aten.sinc.default: (WIDE, 1e-5),
    aten.erfc.default: (WIDE, 1e-5),
    aten.special_erfcx.default: (WIDE[WIDE > -9], 1e-5),
    aten.special_log_ndtr.default: (WIDE, 1e-5),
    aten.erfinv.default: (OPEN, 1e-5),
    aten.special_ndtri.default: (torch.linspace(1e-6, 0.9999, 301), 1e-5),
    aten.lgamma.default: (WIDE, 1e-5),
    aten.digamma.default: (WIDE, 1e-4),
    aten.i0.default: (WIDE, 1e-5),
    aten.special_i0e.default: (WIDE, 1e-5),
    aten.special_i1.default: (WIDE, 1e-5),
    aten.special_i1e.default: (WIDE, 1e-5),
    aten.special_bessel_j0.default: (WIDE, 1e-4),
    aten.special_bessel_j1.default: (WIDE, 1e-4),
    aten.special_bessel_y0.default: (WIDE, 1e-4),
    aten.special_bessel_y1.default: (WIDE, 1e-4),
    aten.special_modified_bessel_k0.default: (WIDE, 1e-5),
    aten.special_modified_bessel_k1.default: (WIDE, 1e-5),
    aten.special_scaled_modified_bessel_k0.default: (POSITIVE, 1e-5),
    aten.special_scaled_modified_bessel_k1.default: (POSITIVE, 1e-5),
    aten.special_spherical_bessel_j0.default: (WIDE, 1e-5),
    aten.log_sigmoid.default: (torch.linspace(-90, 90, 200), 1e-6),
}


@pytest.mark.parametrize("overload", UNARY, ids=str)
def test_rewrite_agrees_with_pytorch(overload: OpOverload) -> None:
    x, tolerance = UNARY[overload]
    torch.testing.assert_close(REWRITES[overload](x), overload(x), rtol=tolerance, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("order", range(5))
def test_polygamma_agrees_with_pytorch(order: int) -> None:
    x = torch.cat([torch.linspace(-4.3, 9, 200), torch.tensor([0.5, 20.0])]).double()
    expected = torch.polygamma(order, x)
    torch.testing.assert_close(REWRITES[aten.polygamma.default](order, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overload", [aten.atan2.default, aten.hypot.default, aten.logaddexp.default], ids=str)
def test_two_operands_agree_with_pytorch(overload: OpOverload) -> None:
    ends = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, 3e38])
    x, y = torch.cat([WIDE, ends.repeat(7)]), torch.cat([WIDE.flip(0), ends.repeat_interleave(7)])
    torch.testing.assert_close(REWRITES[overload](x, y), overload(x, y), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_frexp_is_exact() -> None:
    x = torch.cat([WIDE, 2.0 ** torch.arange(-40, 40), torch.nextafter(2.0 ** torch.arange(9), torch.tensor(0.0))])
    for got, wanted in zip(REWRITES[aten.frexp.Tensor](x), torch.frexp(x), strict=True):
        assert torch.equal(got, wanted.to(got.dtype))


@pytest.mark.parametrize(
    "function",
    [
        torch.expm1,
        torch.log1p,
        torch.erfc,
        torch.erfinv,
        torch.lgamma,
        torch.digamma,
        torch.i0,
        torch.special.ndtri,
        torch.special.log_ndtr,
        torch.sinc,
        torch.log2,
        torch.log10,
        lambda x: torch.atan2(x - 0.5, x - 0.3),
        lambda x: torch.frexp(x),
        lambda x: torch.xlogy(x, x),
        lambda x: torch.special.entr(x),
        lambda x: torch.logit(x, eps=1e-3),
    ],
)
def test_in_the_engine(function: object) -> None:
    check(
        function, (torch.linspace(0.01, 0.99, 31),), (torch.rand(7) * 0.9 + 0.05,), dynamic_axes={"input_0": {0: "N"}}
    )


def test_numbers_below_f32_in_f64() -> None:
    """Literals are read as f32: smaller numbers are products, until tract takes them for zero."""
    check(lambda x: x * 1e-42, (torch.rand(3, dtype=torch.float64),), rtol=1e-12, atol=0)
    with pytest.raises(TranslationError, match="1e-60"):
        check(lambda x: x * 1e-60, (torch.rand(3, dtype=torch.float64),))

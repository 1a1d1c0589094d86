"""Quotients, remainders, rounding, comparisons, logic and bits: PyTorch's sign rules, on integers, floats and bools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_check import check

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

NUMERATORS = torch.tensor([-7, -6, -1, 0, 1, 6, 7, 41])
DENOMINATORS = torch.tensor([2, -2, 3, -3, 7, -7, 41, 1])

QUOTIENTS: dict[str, Function] = {
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "true": torch.div,
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_follow_the_sign_rules(name: str, dtype: torch.dtype) -> None:
    x, y = NUMERATORS.to(dtype)[:, None], DENOMINATORS.to(dtype)
    check(QUOTIENTS[name], (x, y), (x[:3], y), dynamic_axes={"input_0": {0: "N"}})


def test_quotients_of_fractions() -> None:
    x, y = torch.linspace(-50, 50, 301)[:, None], torch.tensor([0.1, -0.3, 7.0, 2.5])
    check(lambda x, y: (x % y, torch.fmod(x, y), x // y, x // 3, x % -2.5), (x, y), rtol=0, atol=1e-5)


def test_unsigned_bytes() -> None:
    x = torch.arange(0, 256, 5, dtype=torch.uint8)
    check(lambda x: (x * x, -x, x // 7, x % 7, x + x, x >> 2, ~x), (x,))


def test_a_quotient_that_is_rounded_is_exact() -> None:
    # tract's x / 41 is x * recip(41), which is below 1 at x = 41.
    x = torch.arange(0, 600).float()
    check(lambda x: (torch.floor(x / 41), torch.ceil(x / 49), torch.trunc(x / 47), torch.round(x / 55)), (x,))


INTEGERS: dict[str, Function] = {
    "square": lambda x: (x * x, x.square(), x**2),
    "cube": lambda x: x**3,
    "power_0": lambda x: x**0,
    "clamp_int_bounds": lambda x: x.clamp(-2, 2),
    "clamp_float_bounds": lambda x: x.clamp(max=1.5),
    "where": lambda x: torch.where(x > 0, x, -1),
    "where_float": lambda x: torch.where(x > 0, x, 0.5),
    "times_float": lambda x: x * 2.5,
    "abs_sign": lambda x: (x.abs(), x.sign(), x.neg()),
    "truth": lambda x: (x.logical_not(), torch.logical_and(x, x + 1), torch.logical_xor(x, x > 0)),
    "bits": lambda x: (x & 5, x | 8, x ^ 3, ~x),
    "shifts": lambda x: (x << 3, x >> 1, x >> 70, x << 64),
    "mean_of_float": lambda x: x.float() / 3,
    "relu": lambda x: torch.relu(x),
    "exp_promotes": lambda x: torch.exp(x),
    "rounding_is_the_identity": lambda x: (x.floor(), x.ceil(), x.trunc(), x.round()),
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "compare": lambda x: (x == 1, x != 1, x >= 0.5),
    "maximum": lambda x: torch.maximum(x, x.T.reshape(x.shape)),
    "isnan": lambda x: (torch.isnan(x), torch.isfinite(x)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_int64(name: str) -> None:
    check(INTEGERS[name], (torch.tensor([[-7, -2, 0], [1, 3, 9]]),))


def test_powers_of_integer_tensors() -> None:
    base, power = torch.tensor([-3, -1, 1, 2, 0, 5, -1, 1]), torch.tensor([3, 5, 7, 10, 0, -2, -3, -4])
    check(torch.pow, (base, power))


BOOLS: dict[str, Function] = {
    "and_or_xor": lambda x, y: (x & y, x | y, x ^ y, ~x),
    "logical": lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x, y)),
    "equal": lambda x, y: (x == y, x != y, x < y, x >= y),
    "arithmetic": lambda x, y: (x + y, x * y, x + 1, x * 0.5, x / 2),
    "where": lambda x, y: torch.where(x, y, ~y),
}


@pytest.mark.parametrize("name", BOOLS)
def test_bools(name: str) -> None:
    check(BOOLS[name], (torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])))


ROUNDING: dict[str, Function] = {
    "modes": lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac()),
    "decimals": lambda x: (x.round(decimals=1), (x * 1000).round(decimals=-2)),
    "casts": lambda x: (x.int(), x.long(), x.bool(), x.half(), x.double()),
    "bytes": lambda x: ((x * 100).to(torch.uint8), (x * 100).to(torch.int8)),
    "sign_of_zero": lambda x: (torch.signbit(x), torch.copysign(x.abs(), x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, 3.25, 0.75], dtype=dtype)
    check(ROUNDING[name], (x,), rtol=1e-6, atol=1e-3 if dtype is torch.float16 else 1e-6)


def test_not_a_number_and_infinities() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 0.0])
    y = torch.tensor([torch.nan, 2.0, 1.0, 1.0, torch.nan])
    check(
        lambda x, y: (
            x.isnan(),
            x.isinf(),
            x.isfinite(),
            torch.isposinf(x),
            torch.isneginf(x),
            torch.nan_to_num(x, 7.0, 8.0, -9.0),
            torch.fmax(x, y),
            torch.fmin(x, y),
        ),
        (x, y),
    )

"""gcd and lcm: Euclid's steps are as many as the worst operands of a type take."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from generic_export.ops.integer import _steps
from tests.engine_check import check

LARGEST = 7540113804746346429  # Fibonacci's 92nd number and the one before: the most steps that int64 has


def test_divisors_and_multiples() -> None:
    first = torch.tensor([12, -18, 0, 7, LARGEST, 1 << 40])
    second = torch.tensor([[8, 27, 5, 0, 4660046610375530309, 1 << 33]] * 2)
    check(torch.gcd, (first, second), (first.flip(0), second))
    small = torch.tensor([12, -18, 0, 7, 6]), torch.tensor([8, 27, 5, 0, -4])
    check(torch.lcm, small)
    check(torch.gcd, tuple(value.to(torch.int8) for value in small))


@given(st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]), st.data())
def test_steps_suffice(dtype: torch.dtype, data: st.DataObject) -> None:
    limits = torch.iinfo(dtype)
    first, second = (abs(data.draw(st.integers(limits.min, limits.max))) for _ in range(2))
    expected = math.gcd(first, second)
    for _ in range(_steps(dtype)):
        first, second = (second, first % second) if second else (first, 0)
    assert (first, second) == (expected, 0)

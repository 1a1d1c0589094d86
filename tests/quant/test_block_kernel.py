"""The compiled pass from stored weights to blocks: the same blocks as the same sums written plainly, from every float type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from generic_export.errors import WeightError
from quant.block_kernel import half
from quant.blocks import GROUP
from quant.packing import unpack_q4_0
from quant.weighted_search import search_rows

POSITIONS = (-8.9, -8.6, -8.3, -8.0, -7.7, -7.4, -7.1, -6.8, -6.4, 6.4, 6.8, 7.1, 7.4, 7.7, 8.0, 8.3)
STORED = (torch.bfloat16, torch.float16, torch.float32)


@njit
def called_half(value):  # type: ignore[no-untyped-def]
    return half(value)


def rounded_half(values: np.ndarray) -> np.ndarray:
    """Float32 to float16 and back, ties as in the kernel."""
    clipped = np.clip(values, np.float32(-65504), np.float32(65504))
    split = clipped * np.float32(2**13 + 1)
    small = np.rint(clipped * np.float32(2**24)) * np.float32(2**-24)
    return np.where(np.abs(clipped) < np.float32(2**-14), small, split - (split - clipped))


def quotient(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    return np.divide(above, below, out=np.full_like(above, otherwise), where=below != 0)


def levels_at(values: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values * factor[:, None]), np.float32(-8), np.float32(7))


def sums_in_order(*terms: np.ndarray) -> list[np.ndarray]:
    """Add up float32 [groups, 32] over the values in their order, each addition rounded."""
    totals = []
    for term in terms:
        total = np.zeros(len(term), np.float32)
        for index in range(GROUP):
            total = total + term[:, index]
        totals.append(total)
    return totals


def plain_search(groups: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The search on float32 [groups, 32], with all sixteen positions, a step at a time: levels 0 to 15 and scales."""
    high, low = groups.max(axis=1), groups.min(axis=1)
    extreme = np.where(high > -low, high, low)
    usable = np.abs(extreme) >= np.float32(1e-8)
    largest = np.where(usable, extreme, np.float32(0))
    unit = groups / np.where(usable, extreme, np.float32(1))[:, None]
    matters = np.abs(groups) if importance is None else importance
    peak = matters.max(axis=1, keepdims=True)
    share = np.divide(matters, peak, out=np.ones_like(groups), where=peak > 0)
    share = np.maximum(share, np.float32(1e-12))

    scale, error = np.zeros_like(largest), np.full_like(largest, np.inf)
    candidate = rounded_half(largest / np.float32(-8))

    def improve() -> np.ndarray:
        levels = levels_at(unit, quotient(largest, candidate, 0.0))
        difference = unit - levels * quotient(candidate, largest, 0.0)[:, None]
        found, overlap, power = sums_in_order(
            share * difference * difference, share * levels * unit, share * levels * levels
        )
        better = found < error
        error[:], scale[:] = np.where(better, found, error), np.where(better, candidate, scale)
        return np.where(better, rounded_half(quotient(overlap, power, -0.125) * largest), candidate)

    improve()
    best, gain = np.full_like(largest, -0.125), np.zeros_like(largest)
    for position in POSITIONS:
        levels = levels_at(unit, np.full_like(largest, position))
        overlap, power = sums_in_order(share * levels * unit, share * levels * levels)
        refitted = overlap / (power + np.float32(np.finfo(np.float32).tiny))
        better = overlap * refitted > gain
        gain, best = np.where(better, overlap * refitted, gain), np.where(better, refitted, best)
    candidate = rounded_half(best * largest)
    for _ in range(3):
        candidate = improve()
    levels = levels_at(groups, quotient(np.ones_like(scale), scale, 0.0))
    return (levels + 8).astype(np.uint8), scale


def check_against_plain(rows: torch.Tensor, importance: torch.Tensor | None = None) -> None:
    done = search_rows(rows, importance, keep_grids=False)
    blocks = unpack_q4_0(done.data)
    groups = rows.to(torch.float32).reshape(-1, GROUP).numpy()
    shares = None if importance is None else importance.expand(rows.shape).reshape(-1, GROUP).numpy()
    levels, scales = plain_search(groups, shares)
    assert np.array_equal(blocks.d.reshape(-1).view(torch.uint16).numpy(), scales.astype(np.float16).view(np.uint16))
    assert np.array_equal(blocks.q.reshape(-1, GROUP).numpy(), levels)
    exact = rows.to(torch.float64)
    energy, difference = exact.square().sum().item(), exact - blocks.dequantize().to(torch.float64)
    assert done.energy == pytest.approx(energy, rel=1e-4, abs=1e-30)
    assert done.squared_error == pytest.approx(difference.square().sum().item(), rel=1e-3, abs=1e-6 * energy + 1e-30)


magnitudes = st.sampled_from([0.0, 1e-30, 1e-9, 3e-7, 1e-4, 0.02, 1.0, 60.0, 6e4])
numbers = st.tuples(st.floats(-1, 1, width=32), magnitudes).map(lambda pair: pair[0] * pair[1])
groups_of_numbers = st.lists(numbers, min_size=GROUP, max_size=GROUP)


@settings(max_examples=150, deadline=None)
@given(st.lists(groups_of_numbers, min_size=1, max_size=3), st.sampled_from(STORED))
def test_blocks_are_those_of_the_plain_search(values: list[list[float]], dtype: torch.dtype) -> None:
    check_against_plain(torch.tensor(values, dtype=torch.float32).to(dtype))


@settings(max_examples=100, deadline=None)
@given(
    groups_of_numbers,
    st.lists(st.floats(0, 1e6, width=32), min_size=GROUP, max_size=GROUP),
    st.sampled_from(STORED),
)
def test_blocks_are_those_of_the_plain_search_with_importance(
    values: list[float], importance: list[float], dtype: torch.dtype
) -> None:
    check_against_plain(torch.tensor([values], dtype=torch.float32).to(dtype), torch.tensor(importance))


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 32), (63, 32), (64, 32), (65, 32), (5, 416), (130, 64)])
def test_every_group_is_filled_and_alone(rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weights = (torch.randn(rows, columns, generator=generator) * 0.1).to(dtype)
    check_against_plain(weights)
    importance = torch.rand(rows, columns, generator=generator)
    check_against_plain(weights, importance)
    whole, last = search_rows(weights, importance), search_rows(weights[-1:], importance[-1:])
    assert torch.equal(whole.data[-1:], last.data)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_all_values_of_sixteen_bits_are_read(dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    short = torch.float16 if dtype == torch.float32 else dtype
    finite = bits.view(short)[bits.view(short).isfinite()]
    finite = finite[finite.float().abs() < 1e5].to(dtype)
    check_against_plain(finite[: len(finite) // GROUP * GROUP].reshape(-1, GROUP))


@settings(deadline=None)  # the first call compiles
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_half_is_a_float16_next_to_the_value(value: float) -> None:
    found, limit = float(called_half(np.float32(value))), 65504.0
    assert float(np.float16(found)) == found
    clipped = min(max(value, -limit), limit)
    assert abs(found - clipped) == abs(float(np.float16(clipped)) - clipped)  # as near as rounding to nearest


def test_without_importance_magnitudes_count() -> None:
    weights = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(search_rows(weights).data, search_rows(weights, weights.abs()).data)


def test_rows_that_share_their_importance_need_no_copy() -> None:
    weights, shared = torch.randn(9, 64), torch.rand(64)
    assert torch.equal(search_rows(weights, shared).data, search_rows(weights, shared.repeat(9, 1)).data)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (6, 63), (69, 31)])
def test_values_that_are_no_numbers_are_refused(dtype: torch.dtype, bad: float, place: tuple[int, int]) -> None:
    weights, importance = torch.ones(70, 64, dtype=dtype), torch.ones(70, 64)
    weights[place] = bad
    with pytest.raises(WeightError, match="inf or NaN"):
        search_rows(weights)
    with pytest.raises(WeightError, match="importance"):
        search_rows(torch.ones(70, 64, dtype=dtype), torch.where(weights.isfinite(), 1.0, bad))
    importance[place] = -1.0
    with pytest.raises(WeightError, match="importance"):
        search_rows(torch.ones(70, 64, dtype=dtype), importance)


def test_a_negative_zero_is_an_importance() -> None:
    weights, importance = torch.randn(2, 32), torch.rand(32)
    importance[4] = 0.0
    negative = importance.clone()
    negative[4] = -0.0
    assert torch.equal(search_rows(weights, importance).data, search_rows(weights, negative).data)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_a_grid_in_many_groups_is_kept_and_a_single_one_does_no_harm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    q = torch.randint(0, 16, (128, GROUP), generator=generator)
    d = (torch.rand(128, 1, generator=generator) * 0.01 + 0.001).half().float()
    weights = torch.where(torch.arange(128).unsqueeze(1) % 2 == 0, (q - 8) * d, torch.randn(128, GROUP) * 0.01)
    kept = unpack_q4_0(search_rows(weights.to(dtype)).data).dequantize()[::2]
    limit = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}[dtype]
    assert bool(((kept - weights[::2]).abs() <= limit * weights[::2].abs()).all())

    alone = torch.randn(64, GROUP, generator=generator) * 0.01
    alone[7] = weights[0]
    stored = alone.to(dtype)

    def error(keep_grids: bool) -> torch.Tensor:
        values = unpack_q4_0(search_rows(stored, keep_grids=keep_grids).data).dequantize().double()
        return ((values - stored.double()).square() * stored.double().abs()).sum(dim=1)

    assert bool((error(True) <= error(False) * (1 + 1e-5)).all())

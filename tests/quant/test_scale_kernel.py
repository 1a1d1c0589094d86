"""The compiled search: its own float16 rounding, groups at the ends of the lanes, values it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.scale_kernel import BAD_IMPORTANCE, BAD_WEIGHT, OK, _half, search_scales


def searched(weights: np.ndarray, importance: np.ndarray | None = None) -> tuple[int, np.ndarray, np.ndarray]:
    levels = np.full((weights.size // 32, 32), 99, np.uint8)
    scales = np.full(weights.size // 32, np.nan, np.float32)
    return search_scales(weights, importance, levels, scales), levels, scales


@settings(deadline=None)  # the first call compiles
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_half_is_a_float16_next_to_the_value(value: float) -> None:
    found, limit = float(_half(np.float32(value))), 65504.0
    assert float(np.float16(found)) == found
    clipped = min(max(value, -limit), limit)
    assert abs(found - clipped) == abs(float(np.float16(clipped)) - clipped)  # as near as rounding to nearest


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 32), (63, 32), (64, 32), (65, 32), (5, 416), (130, 64)])
def test_every_group_is_filled_and_alone(rows: int, columns: int) -> None:
    random = np.random.default_rng(rows)
    weights = random.standard_normal((rows, columns), np.float32)
    importance = random.random((rows, columns), np.float32)
    status, levels, scales = searched(weights, importance)
    assert status == OK
    assert levels.max() <= 15
    assert np.isfinite(scales).all()
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
    one = slice(rows - 1, rows)
    _, last_levels, last_scales = searched(weights[one], importance[one])
    assert np.array_equal(levels[-columns // 32 :], last_levels)
    assert np.array_equal(scales[-columns // 32 :], last_scales)


def test_without_importance_magnitudes_count() -> None:
    weights = np.random.default_rng(0).standard_normal((70, 64), np.float32)
    _, levels, scales = searched(weights)
    _, same_levels, same_scales = searched(weights, np.abs(weights))
    assert np.array_equal(levels, same_levels)
    assert np.array_equal(scales, same_scales)


def test_rows_that_repeat_need_no_copy() -> None:
    weights = np.random.default_rng(0).standard_normal((9, 64), np.float32)
    shared = torch.rand(64)
    _, levels, scales = searched(weights, shared.expand(9, 64).numpy())
    _, same_levels, same_scales = searched(weights, shared.repeat(9, 1).numpy())
    assert np.array_equal(levels, same_levels)
    assert np.array_equal(scales, same_scales)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (6, 63)])
def test_values_that_are_no_numbers_are_reported(bad: float, place: tuple[int, int]) -> None:
    weights = np.ones((7, 64), np.float32)
    importance = np.ones((7, 64), np.float32)
    weights[place] = bad
    assert searched(weights)[0] == BAD_WEIGHT
    assert searched(np.ones((7, 64), np.float32), np.where(np.isfinite(weights), importance, bad))[0] == BAD_IMPORTANCE
    importance[place] = -1.0
    assert searched(np.ones((7, 64), np.float32), importance)[0] == BAD_IMPORTANCE

"""What is compiled for error compensation: as the same steps written plainly, for any number of rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.blocks import GROUP
from quant.column_kernel import _SPAN, descend_group, round_backwards

ROWS = st.integers(1, 3) | st.integers(_SPAN - 1, _SPAN + 2)


def uniform(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.uniform(-1.0, 1.0, shape).astype(np.float32)


def half_scales(generator: np.random.Generator, rows: int) -> np.ndarray:
    scales = (uniform(generator, rows) * 0.1).astype(np.float16).astype(np.float32)
    scales[generator.random(rows) < 0.1] = 0.0
    return scales


@settings(max_examples=25, deadline=None)
@given(columns=st.integers(1, 40), rows=ROWS, seed=st.integers(0, 99))
def test_each_column_makes_up_for_those_behind_it(columns: int, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weight, factor = uniform(generator, columns, rows), np.tril(uniform(generator, columns, columns), -1)
    scales = np.stack([half_scales(generator, rows) for _ in range(2)])
    group_of = generator.integers(0, 2, columns)
    inverses = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    errors, levels = weight.copy(), np.empty_like(weight)
    round_backwards(weight.copy(), errors, levels, scales, inverses, group_of, factor)
    for k in reversed(range(columns)):
        wanted = weight[k] + sum(factor[j, k] * errors[j] for j in range(columns - 1, k, -1))
        expected = np.clip(np.rint(wanted * inverses[group_of[k]]), -8, 7)
        assert (
            levels[k] == expected
        ).mean() > 0.99  # sums in another order: on the edge between two levels either is right
    np.testing.assert_array_equal(errors, weight - levels * scales[group_of])


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_a_group_falls_to_where_no_value_alone_is_better(rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    inputs = uniform(generator, 100, GROUP)
    hessian, weight = inputs.T @ inputs / 100, uniform(generator, GROUP, rows) * np.float32(0.5)
    scales, levels = half_scales(generator, rows), np.rint(uniform(generator, GROUP, rows) * 7).astype(np.float32)
    before = levels * scales
    slopes = (hessian @ (weight - before)).astype(np.float32)
    descend_group(levels, scales, slopes, hessian)
    assert np.abs(levels + 0.5).max() <= 7.5 and np.array_equal(levels, np.rint(levels))
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(slopes, levels * scales - before)
    assert (power(weight - levels * scales, hessian) <= power(weight - before, hessian) * (1 + 1e-4) + 1e-6).all()


def power(error: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """The error of the outputs of each row."""
    rows = torch.from_numpy(error).double().T
    return ((rows @ torch.from_numpy(hessian).double()) * rows).sum(1).numpy()

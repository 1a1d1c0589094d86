"""How two arrays are compared and what the record says; tract's levels in both engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from generic_export import ToleranceLimits, TractCheckTolerance, TractNNEF, assert_io, export_model_to_nnef
from generic_export.compare.comparison import compare
from generic_export.errors import EngineMissingError, MismatchError
from generic_export.inference_target.tract.engines.cli import TractCli

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)


def test_worst_element_values_histogram_and_outliers() -> None:
    reference = np.zeros((2, 3), np.float32)
    candidate = np.array([[0, 1e-9, 5e-5], [0, 0.5, -7.0]], np.float32)
    found = compare("y", candidate, reference, ToleranceLimits(1e-4))
    assert not found.passed and found.worst_index == (1, 2) and found.worst_values == (-7.0, 0.0)
    assert found.elements == 6 and found.outliers == pytest.approx(2 / 6)
    assert [(group.up_to, group.count) for group in found.histogram] == [
        (0.0, 2), (1e-8, 1), (1e-4, 1), (1.0, 1), (None, 1)]  # fmt: skip
    assert str(found) == (
        "output 'y': max abs error 7 at [1, 2] (-7 for 0), max rel error inf, 33.33% of 6 elements beyond the tolerance "
        "(errors: 2 equal, 1 <= 1e-08, 1 <= 0.0001, 1 <= 1, 1 > 1)"
    )


@given(st.lists(st.floats(width=32), min_size=1), st.floats(0, 10, allow_nan=False))
def test_every_element_is_in_one_class(values: list[float], absolute: float) -> None:
    array = np.array(values, np.float32)
    found = compare("y", array, np.zeros_like(array), ToleranceLimits(absolute))
    assert sum(group.count for group in found.histogram) == array.size
    assert compare("y", array, array, ToleranceLimits()).passed


def test_nan_and_infinity_equal_only_their_like() -> None:
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert compare("y", special, special, ToleranceLimits()).passed
    assert not compare("y", -special, special, TractCheckTolerance.ULTRA.limits(F32)).passed
    found = compare("y", special, np.array([0, np.inf, -np.inf], np.float32), ToleranceLimits(1e9, 1e9))
    assert not found.passed and found.max_abs_error == np.inf


def test_shape_and_element_type_come_first() -> None:
    zeros = np.zeros((2, 1), np.float32)
    assert "shape [2, 1], PyTorch has [2]" in str(compare("y", zeros, zeros[:, 0], ToleranceLimits(9, 9)))
    assert "element type float32" in str(compare("y", zeros, zeros.astype(np.float16), ToleranceLimits(9, 9)))


# tract-data 0.23.9, src/tensor.rs, `impl From<Approximation>`: (atol, rtol, outliers) for f32 and f16
LEVELS = {
    "exact": ((0, 0, 0), (0, 0, 0)),
    "close": ((1e-7, 1e-7, 0), (1e-3, 1e-3, 0)),
    "approximate": ((1e-4, 5e-4, 0), (1e-3, 5e-3, 0)),
    "very": ((5e-2, 1e-2, 0), (5e-2, 1e-2, 0)),
    "super": ((0.1, 0.05, 1e-4), (0.1, 0.05, 1e-4)),
    "ultra": ((0.2, 0.1, 5e-4), (0.2, 0.1, 5e-4)),
}


@pytest.mark.parametrize("level", TractCheckTolerance)
def test_levels_are_those_of_tract(level: TractCheckTolerance) -> None:
    for dtype, expected in zip((F32, F16), LEVELS[level.value], strict=True):
        limits = level.limits(dtype)
        assert (limits.absolute, limits.relative, limits.outliers) == expected


class Shift(nn.Module):
    """Adds a constant; the archive of one shift, checked against another, is off by a known amount."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor([by, by]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


# A difference from 0 -> the strictest level that lets it pass.
STRICTEST = {0.0: "exact", 5e-8: "close", 5e-5: "approximate", 2e-2: "very", 8e-2: "super", 0.15: "ultra"}


def _cli_path() -> Path:
    try:
        return TractCli().binary
    except EngineMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("engine", ["wheel", "cli"])
def test_levels_in_the_engines(engine: str, tmp_path: Path) -> None:
    """Each difference passes from one level on, and not at the level before."""
    binary = _cli_path() if engine == "cli" else None
    levels, zeros = list(TractCheckTolerance), torch.zeros(3, 2)
    for error, strictest in STRICTEST.items():
        archive = export_model_to_nnef(Shift(error), zeros, tmp_path / "m.nnef", TractNNEF(check_io=False))
        first = levels.index(TractCheckTolerance(strictest))
        target = TractNNEF(check_io_tolerance=levels[first], specific_tract_binary_path=binary)
        assert len(assert_io(Shift(0.0), zeros, archive, target)) == 1
        if first:
            tighter = replace(target, check_io_tolerance=levels[first - 1])
            with pytest.raises(MismatchError, match=rf"beyond tolerance '{levels[first - 1]}'.*error {error:.3g}"):
                assert_io(Shift(0.0), zeros, archive, tighter)


def test_limits_in_numbers(tmp_path: Path) -> None:
    archive = export_model_to_nnef(Shift(0.01), torch.zeros(4, 2), tmp_path / "m.nnef", TractNNEF(check_io=False))
    for limits, passes in [
        (ToleranceLimits(0.02), True),
        (ToleranceLimits(0.005), False),
        (ToleranceLimits(0, 0, 1.0), True),
    ]:
        target = TractNNEF(check_io_tolerance=limits)
        if passes:
            assert_io(Shift(0.0), torch.zeros(4, 2), archive, target)
        else:
            with pytest.raises(MismatchError, match=r"'atol 0\.005, rtol 0'.*8 elements"):
                assert_io(Shift(0.0), torch.zeros(4, 2), archive, target)


def test_every_differing_output_is_named(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x + self.by, x * 2.0, x - self.by

    archive = export_model_to_nnef(Two(1.0), torch.zeros(2), tmp_path / "m.nnef", TractNNEF(check_io=False))
    with pytest.raises(MismatchError, match=r"2 of 3 outputs.*'output_0'.*'output_2'"):
        assert_io(Two(0.0), torch.zeros(2), archive)


def test_a_tolerance_of_the_largest_value() -> None:
    reference = np.array([100.0, 0.0, np.inf], np.float32)
    limits = ToleranceLimits(of_largest=1e-4)
    assert compare("y", np.array([100.0, 0.009, np.inf], np.float32), reference, limits).passed
    assert not compare("y", np.array([100.0, 0.011, np.inf], np.float32), reference, limits).passed
    assert str(limits) == "atol 0, rtol 0, 0.0001 of the largest"

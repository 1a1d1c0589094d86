"""The data-free algorithms, and how a user's own join them."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import OptionError
from quant import algorithms
from quant.algorithms import BUILT_IN, find_algorithm, load_algorithms
from quant.blocks import Q4Blocks
from quant.protocol import InputStatistics, Quantizer


def heavy_tailed(rows: int = 64, columns: int = 256) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.distributions.StudentT(3.0).sample((rows, columns)) * 0.02


def weighted_error(weight: torch.Tensor, blocks: Q4Blocks) -> torch.Tensor:
    error = (blocks.dequantize() - weight).square() * weight.abs()
    return error.unflatten(-1, (-1, 32)).sum(dim=-1)


@pytest.mark.parametrize("weight", [heavy_tailed(), torch.randn(64, 256, generator=torch.Generator().manual_seed(1))])
def test_search_beats_min_max_in_weighted_error(weight: torch.Tensor) -> None:
    searched, plain = (weighted_error(weight, BUILT_IN[name].quantize(weight)) for name in ("search", "min_max"))
    assert searched.sum() < 0.93 * plain.sum()
    # Scales are compared before they are rounded to float16, which may cost the loser's margin, and no more.
    assert (searched <= plain * 1.01 + 1e-12).all()


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, (2, 64), elements=st.floats(-6e4, 6e4, width=32)))
def test_levels_are_the_nearest_to_the_stored_scale(weight: np.ndarray) -> None:
    values = torch.from_numpy(weight)
    blocks = BUILT_IN["search"].quantize(values)
    assert blocks.d.isfinite().all()
    assert int(blocks.q.max()) <= 15
    d = blocks.d.to(torch.float64).unsqueeze(-1)
    levels = torch.arange(16) - 8
    distance = (levels.view(1, 1, 1, 16) * d.unsqueeze(-1) - values.unflatten(-1, (-1, 32)).unsqueeze(-1)).abs()
    chosen = distance.gather(-1, blocks.q.long().unsqueeze(-1)).squeeze(-1)
    assert (chosen <= distance.amin(dim=-1) * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_extreme_groups(name: str) -> None:
    spike, subnormal, huge = torch.zeros(1, 32), torch.full((1, 32), 1e-40), torch.full((1, 32), 6e5)
    spike[0, 3] = 0.75
    quantize = BUILT_IN[name].quantize
    assert quantize(spike).dequantize()[0, 3] == pytest.approx(0.75, rel=2**-10)
    assert not quantize(spike).dequantize()[0, :3].any()
    assert quantize(subnormal).d.isfinite().all()
    assert quantize(huge).d.isfinite().all()
    assert (quantize(huge).dequantize() > 4.5e5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_on_a_grid_keeps_its_levels(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (16, 8, 32), generator=generator, dtype=torch.uint8)
    original = Q4Blocks(q, torch.rand(16, 8, generator=generator).add_(0.5).to(torch.float16))
    stored = original.dequantize().to(dtype).to(torch.float32)
    found = BUILT_IN["search"].quantize(stored)
    tolerance = 2**-8 if dtype is torch.bfloat16 else 2**-11
    assert torch.allclose(found.dequantize(), original.dequantize(), rtol=2 * tolerance, atol=0)


def test_statistics_move_the_error_to_channels_that_matter_less() -> None:
    weight = heavy_tailed()
    power = torch.logspace(-2, 2, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    with_data = BUILT_IN["search"].quantize(weight, InputStatistics(power, 1000))
    without = BUILT_IN["search"].quantize(weight)
    errors = [((blocks.dequantize() - weight).square() * power).sum() for blocks in (with_data, without)]
    assert errors[0] < 0.9 * errors[1]


# --- the registry ---------------------------------------------------------------------------------


class Coarse:
    """A quantizer of one level."""

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None = None) -> Q4Blocks:
        """Give zeros."""
        groups = weight.unflatten(-1, (-1, 32))
        return Q4Blocks(torch.full(groups.shape, 8, dtype=torch.uint8), torch.zeros(groups.shape[:-1]).half())


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_quantizers.py").write_text(
        "from tests.quant.test_algorithms import Coarse\n"
        "TABLE = {'coarse': Coarse(), 'lazy': Coarse}\nBAD = {'x': 3}\nTAKEN = {'search': Coarse()}\nNUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_quantizers", None)
    return "my_quantizers"


def test_a_users_table_joins_the_built_in_ones(user_module: str) -> None:
    table = load_algorithms(f"{user_module}:TABLE")
    assert set(table) >= {"min_max", "search", "coarse", "lazy"}
    assert all(isinstance(quantizer, Quantizer) for quantizer in table.values())
    assert not find_algorithm("coarse", table).quantize(torch.ones(1, 32)).dequantize().any()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("BAD", "'x' is a int without a method quantize"),
        ("TAKEN", "already has the name 'search'"),
        ("NUMBER", "a int, not a dict"),
        ("MISSING", "cannot be loaded: AttributeError"),
    ],
)
def test_a_wrong_table_is_explained(user_module: str, table: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_algorithms(f"{user_module}:{table}")


def test_a_table_is_written_module_colon_attribute() -> None:
    with pytest.raises(OptionError, match="does not name a table"):
        load_algorithms("json")
    with pytest.raises(OptionError, match="ModuleNotFoundError"):
        load_algorithms("no_such_module_here:TABLE")


def test_installed_packages_add_theirs_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("ep_coarse", "tests.quant.test_algorithms:Coarse", algorithms.ENTRY_POINT_GROUP)
    monkeypatch.setattr(algorithms, "entry_points", lambda group: [point] if group == point.group else [])
    assert "ep_coarse" in load_algorithms()
    broken = EntryPoint("broken", "no_such_module_here:X", algorithms.ENTRY_POINT_GROUP)
    monkeypatch.setattr(algorithms, "entry_points", lambda group: [broken])
    with pytest.raises(OptionError, match=r"'broken'.*cannot be loaded"):
        load_algorithms()


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(OptionError, match="Did you mean 'min_max'"):
        find_algorithm("minmax", BUILT_IN)

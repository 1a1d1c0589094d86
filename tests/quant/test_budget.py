"""Filling a size: the knapsack against brute force, and what makes a tensor sensitive."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generic_export.errors import OptionError
from generic_export.weights.source import InMemoryTensor
from quant.algorithms import BUILT_IN
from quant.budget import (
    Candidate,
    TargetSize,
    kept_plain,
    kind_factor,
    layer_count,
    parse_target,
    weight_sensitivity,
)
from quant.protocol import InputStatistics


def extra(candidates: list[Candidate], kept: set[str]) -> int:
    return sum(each.extra_bytes for each in candidates if each.name in kept)


def harm(candidates: list[Candidate], kept: set[str]) -> float:
    return sum(each.sensitivity for each in candidates if each.name in kept)


SIZES = st.lists(st.tuples(st.integers(1, 400), st.floats(0.01, 10)), min_size=1, max_size=7)


@given(SIZES, st.integers(0, 1500))
@settings(max_examples=60, deadline=None)
def test_nothing_avoids_more_harm_within_the_size(sizes: list[tuple[int, float]], room: int) -> None:
    candidates = [Candidate(str(i), 100 + size, 100, value) for i, (size, value) in enumerate(sizes)]
    kept = kept_plain(candidates, 0, TargetSize(100 * len(candidates) + room))
    assert extra(candidates, kept) <= room
    subsets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(len(candidates) + 1))
    best = max(
        sum(each.sensitivity for each in subset)
        for subset in subsets
        if sum(each.extra_bytes for each in subset) <= room
    )
    assert harm(candidates, kept) == pytest.approx(best)


def test_greedy_by_ratio_would_choose_worse() -> None:
    candidates = [Candidate("small", 2, 1, 2.0), Candidate("large", 101, 1, 100.0)]
    assert kept_plain(candidates, 0, TargetSize(102)) == {"large"}


def test_sizes_of_real_models_are_never_exceeded() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(200, 2, generator=generator).tolist()
    candidates = [Candidate(str(i), int(1e9 * size) + 10, 10, value) for i, (size, value) in enumerate(values)]
    for room in (1, 10**6, 10**9, 17 * 10**9 + 3):
        kept = kept_plain(candidates, 7, TargetSize(7 + 2000 + room))
        assert extra(candidates, kept) <= room
    assert harm(candidates, kept) > 0.2 * sum(each.sensitivity for each in candidates)


@given(st.integers(0, 4000))
def test_a_share_is_of_the_least(growth: int) -> None:
    target = parse_target(f" +{growth / 4:g} %")
    assert target.above(2000) == pytest.approx(2000 + 5 * growth, abs=1)
    assert parse_target(target.written()) == target


@pytest.mark.parametrize("text", ["+%", "+-1%", "10%", "+1e3%", "0", "-5", "+", True])
def test_what_is_no_target(text: Any) -> None:
    with pytest.raises(OptionError, match="not a size"):
        parse_target(text)


def test_a_share_written_wrongly_is_told_how() -> None:
    with pytest.raises(OptionError, match=r"such as \+10%"):
        parse_target("+x%")


def sensitivity(weight: torch.Tensor, statistics: InputStatistics | None = None) -> float:
    return weight_sensitivity(InMemoryTensor("w", weight), BUILT_IN["min_max"], statistics=statistics)


def normal(rows: int = 64, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_statistics_give_the_error_of_the_outputs() -> None:
    weight, power = normal(), torch.full((128,), 1e-4)
    power[:32] = 1.0
    values = BUILT_IN["min_max"].quantize(weight[::8]).dequantize()
    error = ((weight[::8] - values).square() * power).sum() / (weight[::8].square() * power).sum()
    assert sensitivity(weight, InputStatistics(power, 100)) == pytest.approx(float(error), rel=1e-4)


def test_statistics_of_another_width_are_not_used() -> None:
    assert sensitivity(normal(), InputStatistics(torch.rand(64), 100)) == sensitivity(normal())


def test_outliers_make_a_tensor_sensitive_when_nothing_else_is_known() -> None:
    heavy = normal() ** 3
    plain = BUILT_IN["min_max"].quantize(heavy[::8]).dequantize()
    relative = float((plain - heavy[::8]).square().sum() / heavy[::8].square().sum())
    assert sensitivity(heavy) > 1.2 * relative
    assert sensitivity(torch.zeros(8, 32)) == 0.0


def test_kinds_and_layers_that_matter_more() -> None:
    def factor(layer: int, kind: str) -> float:
        return kind_factor(f"model.layers.{layer}.{kind}.weight", "@linears", 32)

    assert factor(16, "mlp.down_proj") > factor(16, "self_attn.q_proj")
    assert factor(16, "self_attn.v_proj") > factor(16, "self_attn.k_proj")
    assert factor(0, "mlp.down_proj") > factor(16, "mlp.down_proj")
    assert kind_factor("transformer.h.1.something.weight", "@linears", 0) > 0
    assert layer_count(["a.3.b", "a.11.b", "norm.weight"]) == 12
    assert layer_count(["norm.weight"]) == 0

"""The cost of exporting modules: one really measured, and what a table makes of several."""

from __future__ import annotations

import pytest

from tests.load_script import load_script

bench = load_script("bench_modules")


@pytest.mark.nightly
def test_a_module_is_measured_both_ways() -> None:
    cost = bench.cost_of("toys:linear", bench.SMALL)
    assert cost.whole > 0 and cost.alone > 0 and not cost.said and cost.within


@pytest.mark.nightly
def test_an_encoder_is_measured_from_its_checkpoint() -> None:
    cost = bench.cost_of_encoder("encoders:bert", "feature-extraction:bert")
    assert cost.whole > cost.alone > 0 and not cost.said and cost.within


def test_a_table_has_the_slowest_first_and_counts_what_is_within() -> None:
    costs = [
        bench.Cost("a:fast", 1.0, 2.0),
        bench.Cost("a:slow", 2.0, 30.0),
        bench.Cost("a:refused", None, 9.0),
        bench.Cost("a:out", said="RuntimeError"),
    ]
    lines = bench.table(costs).splitlines()
    assert lines[:2] == ["3 of 4 exported, 2 within the bar.", "Median 9.0 s, 8.50 x torch.export."]
    assert [line.split(" | ")[0] for line in lines[5:]] == ["| a:slow", "| a:refused", "| a:fast"]
    assert "| 9.0 | - | refused |" in lines[6]

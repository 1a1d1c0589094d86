"""The nightly comparison with rivals: what it keeps, when it complains, what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from generic_export.errors import MissingExtraError
from t2n_llm.bench.compared_engines.llama_cpp import node_package, node_program
from t2n_llm.bench.comparison import ComparisonPlan, Point, Samples, SpeedComparison, SpeedRun
from tests.load_script import load_script
from tests.trained_model import REAL_MODEL

script: Any = load_script("bench_rivals")


def comparison(ours: float, theirs: float, *, slope: float = 0.0) -> SpeedComparison:
    """Return a comparison at four depths and one prompt, in which a step takes longer by `slope` for each past token."""

    def run(name: str, speed: float) -> SpeedRun:
        depths = [
            Point("decode", depth, Samples((1 / (1 / speed + depth * slope),))) for depth in (64, 512, 2048, 8192)
        ]
        return SpeedRun(name, "1", 1, 0.5, 10**8, (Point("prefill", 64, Samples((speed,))), *depths))

    return SpeedComparison(
        ComparisonPlan((64,), (64, 512, 2048, 8192)), (run("ours", ours), run("llama.cpp", theirs)), {}
    )


def history(*ratios: float, machine: str = "here") -> list[dict[str, Any]]:
    return [{"machine": machine, "ratios": {"f16 decode 64": ratio}} for ratio in ratios]


def test_a_ratio_that_falls_by_more_than_a_tenth_is_named() -> None:
    runs = history(0.9, 1.0, 1.1)
    assert script.fallen({"f16 decode 64": 0.91}, runs, "here") == []
    (sentence,) = script.fallen({"f16 decode 64": 0.89}, runs, "here")
    assert "f16 decode 64" in sentence and "0.890" in sentence and "1.000" in sentence


def test_nothing_is_judged_by_few_runs_by_other_machines_or_by_runs_long_ago() -> None:
    assert script.fallen({"f16 decode 64": 0.1}, history(1.0, 1.0), "here") == []
    assert script.fallen({"f16 decode 64": 0.1}, history(*[1.0] * 9, machine="there"), "here") == []
    assert script.fallen({"f16 decode 512": 0.1}, history(*[1.0] * 9), "here") == []
    assert script.fallen({"f16 decode 64": 0.5}, history(*[1.0] * 9, *[0.5] * script.LAST_RUNS), "here") == []


def test_runs_are_kept_as_lines_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    assert script.read_history(path) == []
    codes = [script.judge({"f16 decode 64": ratio}, path) for ratio in (1.0, 1.0, 1.0, 0.5)]
    assert codes == [0, 0, 0, 1]
    with path.open("a") as file:
        file.write('{"machine": "here", "rat\n[]\n')
    assert [run["ratios"]["f16 decode 64"] for run in script.read_history(path)] == [1.0, 1.0, 1.0, 0.5]


def test_ratios_are_ours_over_theirs_and_goals_are_read_from_them() -> None:
    found = script.ratios_of("f16", comparison(10.0, 12.0))
    assert found["f16 decode 64 / llama.cpp, threads 1"] == pytest.approx(10 / 12)
    lines = list(script.goals_table(found, "llama.cpp", {"f16": 0.4e-6}))
    assert "| f16 decode 64 | 0.77 x its speed | 0.83 x its speed | yes |" in lines
    assert "| f16 prefill 64 | 1.25 x its speed | 0.83 x its speed | no |" in lines
    assert "| growth a position and layer, f16 | 0.35 us | 0.40 us | no |" in lines
    assert not any("q4_0" in line for line in lines)


def test_growth_is_the_slope_of_a_step_by_layer() -> None:
    assert script.growth(comparison(10.0, 12.0, slope=3e-6), 0, 30) == pytest.approx(1e-7)


def test_a_table_names_every_contender() -> None:
    text = "\n".join(script.tables("f16", comparison(10.0, 12.0)))
    assert "| tokens a second | ours | llama.cpp | ours / llama.cpp |" in text
    assert "| decode after 8192 | 10.0 | 12.0 | 0.83 x |" in text


@pytest.mark.nightly
def test_a_small_model_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        _ = node_program(), node_package()
    except MissingExtraError as error:
        pytest.skip(str(error))
    sizes = ["--prefill", "8", "--depth", "8,16", "--decode", "2", "--repeat", "1"]
    paths = ["--model", str(REAL_MODEL), "--work", str(tmp_path / "work"), "--history", str(tmp_path / "history.jsonl")]
    assert script.main([*paths, *sizes]) == 0
    out = capsys.readouterr().out
    assert "### f16, 1 thread" in out and "### q4_0, 1 thread" in out and "growth a position and layer" in out
    (line,) = (tmp_path / "history.jsonl").read_text().splitlines()
    assert "q4_0 decode 16 / llama.cpp, threads 1" in json.loads(line)["ratios"]
    assert (tmp_path / "work" / "tiny-llama-real-q4_0" / "export.json").is_file()

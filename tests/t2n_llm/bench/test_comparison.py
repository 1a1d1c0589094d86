"""`t2n-llm bench`: who takes turns with whom, at which depths, and what is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export.errors import EngineRunError, OptionError
from t2n_llm.bench.compared_engines.protocol import Turns
from t2n_llm.bench.comparison import ComparisonPlan, Point, Samples, SpeedComparison, SpeedRun, compare
from t2n_llm.cli.comparison import Grid, plot_comparison
from tests.systems import needs_posix
from tests.t2n_llm.bench.engine_programs import NEEDS_CLI, llama_cpp_lacks
from tests.t2n_llm.command_line import RunningCommand, call, refused, strict_json
from tests.trained_model import REAL_MODEL

# --- through the command line -----------------------------------------------------------------


def test_an_archive_beside_pytorch(real_export: Path) -> None:
    sizes = ("--pp", "8,32", "--depth", "0,16,40", "--tg", 2, "-r", 3, "--threads", 1)
    outcome = call("bench", real_export, "--against", "torch", "--reference", REAL_MODEL, *sizes, "--json")
    assert outcome.code == 0, outcome.err
    report = strict_json(outcome.out)
    assert report["plan"]["prefills"] == [8, 32] and report["plan"]["depths"] == [0, 16, 40]
    ours, torch = report["runs"]
    assert (ours["name"], torch["name"]) == ("tiny-llama-real", "torch float32")
    assert ours["version"].startswith("tract ")
    assert list(report["archives"]) == ["tiny-llama-real"]
    assert report["archives"]["tiny-llama-real"]["bits_per_weight"] == pytest.approx(16, abs=0.1)
    for run in (ours, torch):
        places = [(point["kind"], point["tokens"]) for point in run["points"]]
        assert places == [("prefill", 8), ("prefill", 32), ("decode", 0), ("decode", 16), ("decode", 40)]
        assert all(len(point["tokens_per_second"]["values"]) == 3 for point in run["points"])
        assert run["load_seconds"] > 0 and run["peak_rss_bytes"] > 1e7 and run["threads"] == 1
    assert all(point["ratio_to_first"] == 1.0 for point in ours["points"])
    assert torch["peak_rss_ratio_to_first"] > 1  # its library alone is larger than this model
    pairs = zip(*(point["points"][0]["tokens_per_second"]["values"] for point in (torch, ours)), strict=True)
    assert torch["points"][0]["ratio_to_first"] == pytest.approx(sorted(one / other for one, other in pairs)[1])


def test_the_table_and_the_chart_have_a_place_for_each_number_of_threads(real_export: Path, tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    command: list[object] = ["bench", real_export, real_export / "model.nnef.tar", "--pp", "4,8", "--tg", 1, "-r", 2]
    if not matplotlib_is_there():
        pytest.skip("charts need t2n-llm[plot]")
    outcome = call(*command, "--depth", "0,4", "--threads", "1,2", "--plot", picture)
    assert outcome.code == 0, outcome.err
    assert "1 thread" in outcome.out and "2 threads" in outcome.out
    assert "prefill 8" in outcome.out and "decode after 4" in outcome.out and "x" in outcome.out
    assert "tiny-llama-real (2): tract" in outcome.out
    assert "Decoding after 4 tokens (2 threads)" in outcome.err
    assert picture.read_bytes()[:4] == b"\x89PNG"


def matplotlib_is_there() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(real_export: Path) -> None:
    against = ("bench", real_export, "--against", "torch")
    refused(call("bench", real_export, "--against", "vllm"), "unknown engine")
    refused(call(*against), "tiny-llama-real, whose path is not recorded")
    refused(call(*against, "--pp", "64,2000"), "has 1024 positions, but the benchmark needs 2000")
    refused(call(*against, "--depth", "64,x"), "'x' is not a number")
    refused(call(*against, "--pp", "0"), "prefills is (0,)")
    refused(call("bench", real_export, "--against", "onnxruntime", "--device", "cuda"), "on the CPU")
    refused(call("bench", real_export, "--against", "torch", "--against", "torch"), "is listed twice")


@NEEDS_CLI
def test_other_engines_are_compared_with_tract_from_pip(real_export: Path) -> None:
    refused(call("bench", real_export, "--against", "torch", "--engine", "cli"), "tract from pip")


@pytest.mark.parametrize("end", [pytest.param("ctrl-c", marks=needs_posix), "kill"])
def test_no_process_and_no_file_outlives_a_comparison(
    end: str, real_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    rivals = ["torch", *([] if llama_cpp_lacks() else ["llama.cpp"])]
    against = [word for rival in rivals for word in ("--against", rival)]
    sizes = ("--pp", 512, "--depth", 64, "-r", 1000, "--tg", 1, "--threads", 1)
    command = RunningCommand("bench", real_export, *against, "--reference", REAL_MODEL, *sizes)
    command.wait_for_stage("Prefill of 512")
    if end == "kill":
        command.kill()
        command.end()
        return
    command.press_ctrl_c()
    outcome = command.end()
    assert outcome.code != 0 and "interrupted" in outcome.err and "Traceback" not in outcome.err
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("t2n-bench-")]


def test_lists_leave_out_what_the_model_has_no_positions_for(real_export: Path) -> None:
    from t2n_llm.export.archive_lookup import locate_archive

    archives = [locate_archive(real_export)]  # 1024 positions
    plan = Grid.parse(None, None, "1,all,1").plan(archives, None, 5, 1, against=True)
    assert (plan.prefills, plan.depths) == ((64, 512), (64, 512))
    assert plan.threads[0] == 1 and len(plan.threads) == len(set(plan.threads))
    short = [replace(archives[0], max_positions=100_000)]
    assert Grid.parse(None, None, None).plan(short, None, 5, 1, against=True).depths == (64, 512, 2048, 8192, 16384)
    alone = Grid.parse(None, None, None).plan(archives, None, 5, 1, against=False)
    assert (alone.prefills, alone.depths, alone.decode, alone.threads) == ((512,), (0,), 128, (1,))


# --- the plan ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"prefills": ()}, {"depths": (-1,)}, {"decode": 0}, {"repeats": 0}, {"threads": (0,)}]
)
def test_a_plan_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        ComparisonPlan(**wrong)


@given(
    depths=st.lists(st.integers(0, 9000), min_size=1, max_size=5).map(tuple),
    decode=st.integers(1, 64),
    repeats=st.integers(1, 6),
    warmup=st.integers(0, 2),
    positions=st.none() | st.integers(600, 10_000),
)
def test_no_cache_holds_more_than_the_model_has_positions_for(
    depths: tuple[int, ...], decode: int, repeats: int, warmup: int, positions: int | None
) -> None:
    try:
        plan = ComparisonPlan((1,), depths, decode, repeats, warmup, positions=positions)
    except OptionError:
        assert positions is not None
        return
    assert positions is None or plan.longest <= positions
    for depth in depths:
        assert 0 <= plan.start_of(depth) <= depth
        moved = decode if plan.is_refilled(depth) else plan.rounds * decode
        assert plan.is_refilled(depth) or moved <= depth / 8
        assert plan.start_of(depth) + moved <= plan.longest


# --- taking turns -----------------------------------------------------------------------------


class Book:
    """A contender that notes what it is fed, in a list that all share."""

    def __init__(self, name: str, notes: list[tuple[str, int, int, bool]], seconds: float, positions: int = 10**6):
        self.name, self._notes, self._seconds, self._limit = name, notes, seconds, positions
        self.version, self.load_seconds, self.held, self.closed = "1", 0.5, 0, 0

    prefill = ((0, 512),)

    def check(self) -> None: ...

    def prepare(self, scratch: Path) -> None:
        assert scratch.is_dir() and not list(scratch.iterdir())

    def start(self, threads: int, positions: int) -> Book:
        self._limit = min(self._limit, positions)
        return self

    def time_turns(self, turns: Turns, *, fresh: bool) -> list[float]:
        self.held = 0 if fresh else self.held
        for turn in turns:
            self._notes.append((self.name, self.held, len(turn), fresh and not self.held))
            self.held += len(turn)
        if self.held > self._limit:
            raise EngineRunError("too many tokens.")
        return [self._seconds * len(turn) for turn in turns]

    def peak_rss_bytes(self) -> int:
        return 1000

    def close(self) -> None:
        self.closed += 1


def contest(
    plan: ComparisonPlan, speeds: Sequence[float] = (10.0, 20.0)
) -> tuple[SpeedComparison, list[Any], list[Book]]:
    notes: list[tuple[str, int, int, bool]] = []
    books = [Book(name, notes, 1 / speed) for name, speed in zip("abc", speeds, strict=False)]
    return compare(books, plan, 100, lambda _: None), notes, books


def test_contenders_take_turns_and_nobody_is_always_first() -> None:
    comparison, notes, books = contest(ComparisonPlan((4,), (0,), decode=1, repeats=3, warmup=1))
    assert [name for name, _, length, _ in notes if length == 4] == list("abbaabba")
    assert [book.closed for book in books] == [1, 1]
    first, second = comparison.runs
    assert first.speed("prefill", 4).values == pytest.approx((10.0,) * 3)  # the warm-up does not count
    assert comparison.ratio(second, "prefill", 4) == comparison.ratio(second, "decode", 0) == pytest.approx(2.0)
    assert comparison.ratio(first, "decode", 0) == 1.0


def test_shallow_caches_are_filled_anew_and_deep_ones_once() -> None:
    plan = ComparisonPlan((1,), (2000, 0, 10), decode=2, repeats=2, warmup=1)
    comparison, notes, _ = contest(plan, (10.0,))
    fed = [note[1:] for note in notes][3:]  # after the prompts
    assert fed[:6] == [(0, 1, True), (1, 1, False)] * 3  # no depth: each repeat begins with nothing
    refilled, deep = fed[6:15], fed[15:]
    assert refilled == [(0, 10, True), (10, 1, False), (11, 1, False)] * 3
    filling, steps = deep[:4], deep[4:]
    assert filling == [(12, 512, False), (524, 512, False), (1036, 512, False), (1548, 452, False)]
    assert steps == [(position, 1, False) for position in range(2000, 2006)]
    assert [point.tokens for point in comparison.runs[0].points] == [1, 0, 10, 2000]


def test_the_last_depth_ends_where_the_models_positions_end() -> None:
    plan = ComparisonPlan((1,), (1024,), decode=4, repeats=3, warmup=0, positions=1024)
    _, notes, _ = contest(plan, (10.0,))
    assert plan.start_of(1024) == 1012
    assert max(held + length for _, held, length, _ in notes) == 1024


def test_each_number_of_threads_is_a_run_of_its_own() -> None:
    comparison, _, books = contest(ComparisonPlan((2,), (0,), decode=1, repeats=1, warmup=0, threads=(1, 3)))
    assert [(run.name, run.threads) for run in comparison.runs] == [("a", 1), ("b", 1), ("a", 3), ("b", 3)]
    assert [book.closed for book in books] == [2, 2]
    assert comparison.with_threads(3)[1].name == "b"


def test_all_are_closed_when_one_fails() -> None:
    notes: list[tuple[str, int, int, bool]] = []
    books = [Book("a", notes, 0.1), Book("b", notes, 0.1, positions=3)]
    with pytest.raises(EngineRunError):
        compare(books, ComparisonPlan((4,), (0,), decode=1), 10, lambda _: None)
    assert [book.closed for book in books] == [1, 1]


def test_a_chart_shows_every_contender(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need t2n-llm[plot]")
    points = tuple(Point(kind, tokens, Samples((5.0, 6.0))) for kind in ("prefill", "decode") for tokens in (64, 512))
    runs = [SpeedRun(name, "1", threads, 0.5, 10**8, points) for threads in (1, 2) for name in ("ours", "theirs")]
    comparison = SpeedComparison(ComparisonPlan((64, 512), (64, 512), threads=(1, 2)), tuple(runs), {})
    plot_comparison(comparison, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    assert "theirs, 2 threads" in drawn and "ours, 1 thread" in drawn

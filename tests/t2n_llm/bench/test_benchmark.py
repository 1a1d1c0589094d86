"""`t2n-llm bench` and `profile`: figures that move with what is measured, both engines, charts, and what is refused."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from generic_export import TractNNEF, export_model_to_nnef
from generic_export.errors import MissingExtraError, OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.install import find_tract_cli
from generic_export.read.contents import StoredTensor, read_contents
from generic_export.read.outline import read_outline
from t2n_llm import export_llm
from t2n_llm.bench.benchmark import bench_archives
from t2n_llm.bench.compared_engines.archive import fresh_session
from t2n_llm.bench.comparison import ComparisonPlan, Point, Samples, SpeedComparison, SpeedRun
from t2n_llm.bench.profiling import profile_archive
from t2n_llm.bench.traffic import bytes_read
from t2n_llm.cli.comparison import plot_comparison
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.zoo.tiny_model import build_tiny_model
from tests.shared_folders import SharedExport
from tests.t2n_llm.bench.engine_programs import NEEDS_CLI
from tests.t2n_llm.command_line import call, refused, run_python, strict_json

QUICK = ("--pp", 16, "--tg", 4, "--repeat", 3)


@pytest.fixture(scope="module")
def batch_export(tiny_llama: Path, shared_export: SharedExport) -> Path:
    """The random Llama with the batch as a symbol."""
    return shared_export(tiny_llama, dtype="f32", batch=True, check=False, require_tokenizer=False)


# --- bench ------------------------------------------------------------------------------------


def test_two_archives_side_by_side(real_export: Path, tiny_export: Path) -> None:
    outcome = call("bench", real_export, tiny_export, *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    report = strict_json(outcome.out)
    assert report["plan"]["prefills"] == [16] and report["plan"]["depths"] == [0]
    assert (report["plan"]["decode"], report["plan"]["repeats"], report["plan"]["threads"]) == (4, 3, [1])
    first, second = report["runs"]
    assert (first["name"], second["name"]) == ("tiny-llama-real", "tiny-llama")
    for run in (first, second):
        assert [point["kind"] for point in run["points"]] == ["prefill", "decode"]
        for point in run["points"]:
            speed = point["tokens_per_second"]
            values = speed["values"]
            assert len(values) == 3
            assert speed["median"] == sorted(values)[1] > 0
            assert speed["spread"] == pytest.approx((max(values) - min(values)) / 2 / sorted(values)[1])
        assert run["load_seconds"] > 0
        assert run["peak_rss_bytes"] > report["archives"][run["name"]]["archive_bytes"] > 0
    assert {point["ratio_to_first"] for point in first["points"]} == {1.0}
    assert second["points"][1]["ratio_to_first"] > 1  # 64 wide and 2 layers against 256 and 6
    bits = [report["archives"][run["name"]]["bits_per_weight"] for run in (first, second)]
    assert bits == [pytest.approx(16, abs=0.1), pytest.approx(32)]


def test_states_that_are_fed_back_are_part_of_a_step(tmp_path: Path) -> None:
    build_tiny_model("mamba").save_pretrained(tmp_path / "mamba")
    export_llm(str(tmp_path / "mamba"), tmp_path / "export", check=False, require_tokenizer=False)
    outcome = call("bench", tmp_path / "export", *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    (run,) = strict_json(outcome.out)["runs"]
    assert run["points"][1]["tokens_per_second"]["median"] > 0
    archive = locate_archive(tmp_path / "export")
    turns = [[np.array([ids])] for ids in ([3, 5, 7], [9], [4])]
    with TractWheel().load(archive.path) as model:
        run, timed = fresh_session(model), fresh_session(model)
        expected = [run.run(turn)[0] for turn in turns]
        assert len(timed.time_turns(turns[:2])) == 2
        assert np.array_equal(timed.run(turns[2])[0], expected[2])
        assert not np.array_equal(fresh_session(model).run(turns[2])[0], expected[2])


def test_what_takes_more_than_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return torch.stack(values).sum(0)

    archive = export_model_to_nnef(Sum(), tuple(torch.randn(4, 2, 3)), tmp_path / "sum", TractNNEF(check_io=False))
    outcome = call("bench", archive)
    refused(outcome, "and 1 more")
    assert outcome.line("error").count(" f32") == 3


def test_decoding_after_many_tokens_is_slower(real_export: Path) -> None:
    archive = locate_archive(real_export)

    def speed(depth: int) -> float:
        plan = ComparisonPlan((1,), (depth,), decode=8, repeats=3)
        return bench_archives([archive], TractWheel(), plan, lambda _: None).runs[0].speed("decode", depth).median

    # Other work on the machine may slow the one down and not the other: a difference shows in one of a few tries.
    assert any(speed(900) < speed(0) for _ in range(4))


def test_the_table_names_sizes_and_ratios(real_export: Path) -> None:
    outcome = call("bench", real_export, real_export / "model.nnef.tar", "--pp", 8, "--tg", 2, "--depth", 3, "-r", 2)
    assert outcome.code == 0, outcome.err
    assert "prefill 8" in outcome.out and "decode after 3" in outcome.out and "size on disk" in outcome.out
    assert "tiny-llama-real (1)" in outcome.out and "tiny-llama-real (2)" in outcome.out
    assert (
        len([word for word in outcome.out.split() if word.endswith("x") and word[:-1].replace(".", "").isdigit()]) == 2
    )
    assert "Loading tiny-llama-real (2)" in outcome.err


def test_a_batch_symbol_is_bound(batch_export: Path) -> None:
    plan = ComparisonPlan((8,), (0,), decode=2, repeats=1, warmup=0)
    report = bench_archives([locate_archive(batch_export)], TractWheel(), plan, lambda _: None)
    assert report.runs[0].speed("decode", 0).median > 0


@NEEDS_CLI
def test_llm_bench_of_the_command_gives_the_same_report(short_model: Path, shared_export: SharedExport) -> None:
    outcome = call(
        "bench", shared_export(short_model, check=False), "--engine", "cli", "--repeat", 2, "--warmup", 0, "--json"
    )
    assert outcome.code == 0, outcome.err
    report = strict_json(outcome.out)
    (run,) = report["runs"]
    assert "(command, cpu)" in run["version"] and run["load_seconds"] > 0
    prefill, decode = (point["tokens_per_second"] for point in run["points"])
    assert len(prefill["values"]) == 2
    assert decode["median"] > 1
    # Not the peak of this process, PyTorch included, which a child starts with.
    assert report["archives"][run["name"]]["archive_bytes"] < run["peak_rss_bytes"] < 200e6


@NEEDS_CLI
@pytest.mark.parametrize("sizes", [("--pp", 64), ("--tg", 4), ("--depth", 1)])
def test_sizes_that_llm_bench_would_ignore_are_refused(tiny_export: Path, sizes: tuple[object, ...]) -> None:
    refused(call("bench", tiny_export, "--engine", "cli", *sizes), "measures 512 and 128")


def test_what_cannot_be_measured_is_refused_before_the_first_run(real_export: Path, tmp_path: Path) -> None:
    refused(call("bench", real_export, "--pp", 2000), "the model has 1024 positions, but the benchmark needs 2000")
    refused(call("bench", real_export, "--depth", 0, "--tg", 1100), "the benchmark needs 1100")
    refused(call("bench", real_export, tmp_path / "nowhere"), "no such folder")
    refused(call("bench", real_export, "--engine", "gpu"), "engine 'gpu' is unknown")
    refused(call("bench", real_export, "--device", "tpu"), "device 'tpu' is unknown")
    refused(call("bench", real_export, "--repeat", 0), "--repeat")


def test_an_archive_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.nnef").write_text(
        "version 1.0;\nextension tract_registry tract_core;\n"
        'graph net(x) -> (y) { x = tract_core_external(shape=[4], datum_type="f32"); y = tanh(x); }\n'
    )
    refused(call("bench", tmp_path), "the inputs are x: [4] f32")
    refused(call("profile", tmp_path), "no symbol S")


@pytest.mark.parametrize("engine", ["wheel", pytest.param("cli", marks=NEEDS_CLI)])
@pytest.mark.parametrize("command", [("bench",), ("profile", "--prefill", 4)])
def test_a_device_that_is_not_here_is_told(real_export: Path, engine: str, command: tuple[object, ...]) -> None:
    outcome = call(*command, real_export, "--engine", engine, "--device", "metal")
    if sys.platform != "darwin":
        refused(outcome, "cannot compute on metal here")


def test_generation_on_a_device_that_is_not_here_is_told(real_export: Path) -> None:
    outcome = call("generate", real_export, "Once", "--max-new-tokens", 1, "--device", "metal")
    if sys.platform != "darwin":
        refused(outcome, "cannot compute on metal here")
    refused(call("generate", real_export, "Once", "--device", "tpu"), "device 'tpu' is unknown")


# --- charts -----------------------------------------------------------------------------------


def report_of(*speeds: tuple[float, ...]) -> SpeedComparison:
    plan = ComparisonPlan((512,), (0,))
    runs = tuple(
        SpeedRun(
            f"model-{index}",
            "1",
            1,
            0.5,
            50_000_000,
            (Point("prefill", 512, Samples(speed)), Point("decode", 0, Samples(speed))),
        )
        for index, speed in enumerate(speeds)
    )
    return SpeedComparison(plan, runs, {})


def test_a_chart_is_drawn(real_export: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need t2n-llm[plot]")
    picture = tmp_path / "bench.png"
    done = call("bench", real_export, "--pp", 4, "--tg", 2, "-r", 2, "--plot", picture)
    assert done.code == 0 and f"drawn     {picture}" in done.out
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800 and height > 200


def test_a_chart_shows_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need t2n-llm[plot]")
    pictures = []
    for index, speeds in enumerate(([(100.0,)], [(100.0,), (200.0, 300.0)], [(100.0,), (250.0, 250.0)])):
        plot_comparison(report_of(*speeds), tmp_path / f"{index}.svg")
        pictures.append((tmp_path / f"{index}.svg").read_text())
    assert "model-1" in pictures[1] and "model-1" not in pictures[0]
    assert pictures[1] != pictures[2]  # the same medians, without a spread


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(
    real_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = call("bench", real_export, "--plot", tmp_path / "bench.png")
    refused(outcome, "matplotlib")
    assert "t2n-llm[plot]" in outcome.line("hint")
    assert "Loading" not in outcome.err
    with pytest.raises(MissingExtraError):
        plot_comparison(report_of((1.0,)), tmp_path / "bench.png")


def test_names_that_are_no_pictures_are_refused(real_export: Path, tmp_path: Path) -> None:
    refused(call("bench", real_export, "--plot", tmp_path / "bench.txt"), "not an image file name")
    refused(call("bench", real_export, "--plot", tmp_path / "no" / "bench.png"), "does not exist")


# --- profile ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["wheel", pytest.param("cli", marks=NEEDS_CLI)])
def profile_report(request: pytest.FixtureRequest, real_export: Path, real_batch_export: Path) -> Any:
    """The profile of the trained model, with the command that of its two layers and a batch symbol, which is bound.

    Each of its two phases takes five seconds, which is tract's choice.
    """
    export = real_export if request.param == "wheel" else real_batch_export
    outcome = call("profile", export, "--prefill", 32, "--depth", 64, "--engine", request.param, "--json")
    assert outcome.code == 0, outcome.err
    report = strict_json(outcome.out)
    assert report["engine"] == request.param
    return report


@pytest.fixture(scope="module")
def real_batch_export(short_model: Path, shared_export: SharedExport) -> Path:
    """Two layers of the trained model with the batch as a symbol."""
    return shared_export(short_model, batch=True, check=False)


def test_time_is_told_by_operator_and_by_module(profile_report: Any) -> None:
    report, engine = profile_report, profile_report["engine"]
    prefill, decode = report["phases"]
    assert (prefill["new_tokens"], prefill["past_tokens"], prefill["caches_as_inputs"]) == (32, 0, False)
    assert (decode["new_tokens"], decode["past_tokens"], decode["caches_as_inputs"]) == (1, 64, engine == "cli")
    assert prefill["seconds"] > decode["seconds"] > 0
    layers = 6 if engine == "wheel" else 2
    own = {group["name"]: group["nodes"] for group in prefill["operators"]}
    assert own["DynamicKeyValueCache"] == 2 * layers
    assert "DynamicKeyValueCache" not in {group["name"] for group in decode["operators"]}
    for phase in (prefill, decode):
        for groups in (phase["operators"], phase["modules"]):
            assert sum(group["share"] for group in groups) == pytest.approx(1)
            assert [group["seconds"] for group in groups] == sorted((g["seconds"] for g in groups), reverse=True)
            assert sum(group["seconds"] for group in groups) <= phase["seconds"] * 1.05
        operators = {group["name"]: group for group in phase["operators"]}
        modules = {group["name"]: group for group in phase["modules"]}
        assert operators["Softmax"]["nodes"] == layers
        assert operators["OptMatMul"]["nodes"] == 1 + 7 * layers + 3 * layers  # attention: scores, sums, keys rounded
        assert modules["model.layers.*.mlp.down_proj"]["kind"] == "Linear"
        assert modules["model.layers.*.self_attn"]["seconds"] >= operators["Softmax"]["seconds"] * 0.99
        assert modules.get("(not in one module)", {"share": 0})["share"] < 0.1
    assert all(limit > 0 for limit in report["limits"].values())


@pytest.mark.parametrize("profile_report", ["wheel"], indirect=True)
def test_a_step_is_timed_with_the_engines_state_and_says_what_it_reads(profile_report: Any, real_export: Path) -> None:
    _, decode = profile_report["phases"]
    assert [step["past"] for step in decode["steps"]] == [16, 32, 64]
    assert decode["steps"][-1]["seconds"] == decode["seconds"]
    assert "Concat" not in {group["name"] for group in decode["operators"] if group["nodes"] >= 12}
    kept = [tensor for tensor in read_contents(locate_archive(real_export).path).tensors if tensor.dtype == "f16"]
    caches = 65 * 12 * 4 * 32 * 2
    for groups in (decode["operators"], decode["modules"]):
        assert sum(group["bytes"] for group in groups) == pytest.approx(
            sum(tensor.data_bytes for tensor in kept) + caches, rel=0.02
        )
    linear = next(group for group in decode["modules"] if group["name"].endswith("mlp.down_proj"))
    assert linear["flops"] == pytest.approx(linear["bytes"], rel=0.05)  # f16: two bytes a weight, and two operations


def test_the_attention_of_the_operator_is_what_the_rest_leaves(short_model: Path, shared_export: SharedExport) -> None:
    """With the batch as a symbol, which is bound, and layers in fragments, whose nodes belong to the modules."""
    options = {"activations": "f16", "attention": "sdpa", "batch": True, "fragments": True}
    outcome = call(
        "profile", shared_export(short_model, check=False, **options), "--prefill", 8, "--depth", 64, "--json"
    )
    assert outcome.code == 0, outcome.err
    prefill, decode = strict_json(outcome.out)["phases"]
    assert (prefill["past_tokens"], decode["past_tokens"]) == (0, 64)
    names = {group["name"] for group in decode["operators"]}
    assert "(attention, caches kept by the engine)" in names
    assert "FlashSDPA" not in names
    for phase in (prefill, decode):
        modules = {group["name"]: group for group in phase["modules"]}
        assert modules["model.layers.*.mlp.up_proj"]["kind"] == "Linear"
        assert modules["model.layers.*.mlp.up_proj"]["bytes"] > 0
        assert not [name for name in modules if "llama_decoder_layer" in name]


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    graph = read_outline(
        """version 1.0;
        graph moe(x) -> (y) {
          x = tract_core_external(shape=[S, 64], datum_type="f32");
          w = variable<scalar>(label="w", shape=[8, 64, 64]);
          y = tract_moe_ffn(x, w, k=2);
        }"""
    )
    stored = [StoredTensor("w", (8, 64, 64), "f16", 65536)]
    assert bytes_read(graph, stored, {"S": 1}) == {"y": 16384}
    assert bytes_read(graph, stored, {"S": 512}) == {"y": 65536}


@pytest.mark.nightly
def test_without_a_past_the_engine_keeps_the_caches(real_export: Path) -> None:
    """At every commit: the prefill of each other profile."""
    outcome = call("profile", real_export, "--prefill", 8, "--depth", 0, "--rows", 99)
    assert outcome.code == 0, outcome.err
    assert "Caches were inputs" not in outcome.out
    assert outcome.out.count("DynamicKeyValueCache") == 2


def test_an_archive_of_tracts_own_has_operators_but_no_modules(
    half_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "stateful.nnef.tgz"
    run_python(
        "import sys, tract; n = tract.nnef().with_tract_transformers().with_tract_extra(); m = n.load(sys.argv[1]); "
        "m.transform('transformers_detect_all'); n.write_model_to_tar_gz(m, sys.argv[2])",
        half_export / "model.nnef.tar",
        written,
    )
    archive = locate_archive(written)
    report = profile_archive(archive, TractWheel(), prefill=4, past=4, progress=print)
    # It is shown twice, and takes ten seconds.
    monkeypatch.setattr("t2n_llm.bench.profiling.profile_archive", lambda *_, **options: report)
    for rows in (2, 99):
        outcome = call("profile", written, "--prefill", 4, "--depth", 4, "--rows", rows)
        assert outcome.code == 0, outcome.err
        assert "module" not in outcome.out
        assert "Caches were inputs" not in outcome.out
        assert ("... " in outcome.out) is (rows == 2)  # the rows that are left out are summed up
    # Not among the first two rows on every processor.
    assert "OptMatMul" in outcome.out and "(attention, caches kept by the engine)" in outcome.out
    if find_tract_cli() is not None:
        with pytest.raises(OptionError, match="the engine keeps its caches"):
            profile_archive(archive, TractCli(), prefill=4, past=4, progress=print)


def test_sizes_beyond_the_model_are_refused(real_export: Path) -> None:
    refused(call("profile", real_export, "--prefill", 2000), "has 1024 positions")
    refused(call("profile", real_export, "--prefill", 4, "--depth", 1024), "the profile needs 1025")


def test_samples_say_their_middle_and_their_spread() -> None:
    samples: Callable[..., Samples] = lambda *values: Samples(tuple(values))  # noqa: E731
    assert samples(3.0, 1.0, 2.0).median == 2.0
    assert samples(3.0, 1.0, 2.0).spread == 0.5
    assert samples(4.0).spread == 0.0
    assert samples(0.0, 0.0).spread == 0.0

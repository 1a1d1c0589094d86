"""Both engines asked for nodes, times and devices; and the readers of what they answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from generic_export.devices import DEVICES
from generic_export.errors import DeviceMissingError, EngineLoadError, EngineRunError, OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.engine import EngineNode, Examiner, IoFact
from generic_export.inference_target.tract.engines.measure import (
    evaluate,
    example_inputs,
    read_llm_bench,
    read_nodes,
    read_profile,
)
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.inference_target.tract.releases.install import find_tract_cli

GRAPH = """version 1.0;
extension tract_registry tract_core;
extension tract_symbol S;
graph net(x) -> (y) {
  x = tract_core_external(shape=[S, 64], datum_type="f32");
  w = [[0.5, 1.0]];
  h = tanh(x);
  y = reshape(square(h), shape=[S, 2, 32]);
}
"""
BOTH = ("wheel", "cli")


def engine(name: str, device: str = "cpu") -> TractWheel | TractCli:
    if name == "wheel":
        return TractWheel(device=device)
    if find_tract_cli() is None:
        pytest.skip("tract command not installed: run scripts/install_tract_cli")
    return TractCli(device=device)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "graph.nnef").write_text(GRAPH)
    return tmp_path / "net"


def test_both_engines_list_the_same_nodes(archive: Path) -> None:
    lists = []
    for name in BOTH:
        examiner: Examiner = engine(name)
        lists.append(Counter((node.operator, node.name, node.costs) for node in examiner.dump(archive)))
    assert lists[0] == lists[1]
    assert ("Tanh", "h") in {(operator, name) for operator, name, _ in lists[0]}


@pytest.mark.parametrize("name", BOTH)
def test_a_profile_times_the_nodes_at_the_sizes_asked_for(archive: Path, name: str) -> None:
    seconds = {}
    for size in (1, 4096):
        profile = engine(name).profile(archive, {"S": size})
        times = {node.name: node.seconds for node in profile.nodes}
        assert profile.iterations > 1
        assert sum(filter(None, times.values())) <= profile.seconds * 1.01
        seconds[size] = times["h"] or 0.0
    assert seconds[4096] > 10 * seconds[1] > 0


@pytest.mark.parametrize("name", BOTH)
def test_a_refused_archive_is_a_load_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "graph.nnef").write_text(GRAPH.replace("tanh", "no_such_operator"))
    with pytest.raises(EngineLoadError, match="no_such_operator"):
        engine(name).dump(tmp_path)


def test_turns_are_timed_in_the_worker_on_one_state(archive: Path) -> None:
    with TractWheel().load(archive) as model:
        seconds = model.time_turns([[np.zeros((size, 64), np.float32)] for size in (1, 1, 4096)])
        assert len(seconds) == 3
        assert seconds[2] > seconds[1] > 0
        times = model.load_times()
        assert min(times.load, times.optimise) > 0
        with pytest.raises(EngineRunError):
            model.time_turns([[np.zeros((1, 63), np.float32)]])


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("device", [device for device in DEVICES if device != "cpu"])
def test_a_device_that_is_not_here_is_named_with_a_hint(archive: Path, name: str, device: str) -> None:
    chosen = engine(name, device)
    try:
        nodes = chosen.dump(archive)
    except DeviceMissingError as error:
        assert device in error.message.lower()
        assert "--device cpu" in (error.hint or "")
    else:  # the machine has one
        assert nodes


def test_a_wrong_archive_is_not_taken_for_a_missing_device(tmp_path: Path) -> None:
    (tmp_path / "graph.nnef").write_text("nonsense")
    with pytest.raises(EngineLoadError):
        TractWheel().load(tmp_path)


@pytest.mark.parametrize("kind", [TractWheel, TractCli])
def test_an_unknown_device_is_refused_before_anything_starts(kind: type[TractWheel | TractCli]) -> None:
    if kind is TractCli and find_tract_cli() is None:
        pytest.skip("tract command not installed: run scripts/install_tract_cli")
    with pytest.raises(OptionError, match="'tpu' is unknown"):
        kind(device="tpu")


# --- readers ----------------------------------------------------------------------------------


def test_nodes_of_loop_bodies_know_where_they_stand() -> None:
    record = {"qualified_id": [[[3, "loop"]], 1], "op_name": "Add", "node_name": "a", "cost": {"FMA(F32)": "2"}}
    assert read_nodes(json.dumps({"nodes": [record]})) == (EngineNode("Add", "a", "loop", (("FMA(F32)", "2"),)),)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": 3}', '{"nodes": [3]}', '{"nodes": [{}]}', "Error: no"])
def test_an_unreadable_answer_is_a_run_error(text: str) -> None:
    with pytest.raises(EngineRunError):
        read_nodes(text)
    with pytest.raises(EngineRunError):
        read_profile(text)


def test_a_list_without_times_is_no_profile() -> None:
    with pytest.raises(EngineRunError, match="no times"):
        read_profile('{"nodes": [], "profiling_info": null}')


METRICS = "\n".join(
    json.dumps({"metric": name, "value": value})
    for name, value in {
        "pp512": 900.5,
        "tg128": 30.25,
        "time_to_before_optimize": 1.5,
        "time_to_model_ready": 2.0,
    }.items()
)
READINGS = """#ReadingsV1
   time cor        vsz        rsz     rszmax event
  0.000   2   44036096   10362880   99999999 spawned_heartbeat
  1.500   2  113258496   40000000   99999999 model_loaded
123.000   2  113258496   30000000   99999999 done
"""


def test_the_figures_of_llm_bench_are_found() -> None:
    bench = read_llm_bench(METRICS, READINGS)
    assert (bench.prefill, bench.decode, bench.load, bench.optimise) == (900.5, 30.25, 1.5, 0.5)
    # rszmax starts with what the parent process once took (kernel fs/exec.c); the sampled size does not.
    assert bench.peak_rss_bytes == 40000000


@pytest.mark.parametrize("cut", range(0, len(METRICS) - 1, 17))
def test_figures_cut_short_are_a_run_error(cut: int) -> None:
    with pytest.raises(EngineRunError, match="cannot be parsed"):
        read_llm_bench(METRICS[:cut], READINGS)


@pytest.mark.parametrize(
    ("dim", "value"), [("7", 7), ("S", 3), ("S+P", 13), ("2*S", 6), ("(S+1)/2", 2), ("P-S", 7), ("-S+P", 7)]
)
def test_dimensions_are_evaluated(dim: str, value: int) -> None:
    assert evaluate(dim, {"S": 3, "P": 10}) == value


@pytest.mark.parametrize("dim", ["T", "S+", "S**2", "__import__('os')", "S/0", "1.5", "(" * 300 + "S" + ")" * 300])
def test_a_dimension_without_a_value_is_an_option_error(dim: str) -> None:
    with pytest.raises(OptionError, match="dimension"):
        evaluate(dim, {"S": 3})


def test_example_inputs_have_the_declared_types() -> None:
    facts = [IoFact("ids", "i64", ("1", "S")), IoFact("past", "f16", ("1", "P", "4")), IoFact("on", "bool", ())]
    arrays = example_inputs(facts, {"S": 2, "P": 0})
    assert [(array.shape, array.dtype.name) for array in arrays] == [
        ((1, 2), "int64"),
        ((1, 0, 4), "float16"),
        ((), "bool"),
    ]
    with pytest.raises(OptionError, match="tdim"):
        example_inputs([IoFact("n", "tdim", ())], {})

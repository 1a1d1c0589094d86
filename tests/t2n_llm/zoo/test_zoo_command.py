"""`t2n-llm zoo` as a user meets it: real cells, files, exit codes."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from t2n_llm.zoo.history import read_results, write_results
from t2n_llm.zoo.verdict import FAILED, RIGHT, CellVerdict
from tests.systems import needs_posix
from tests.t2n_llm.command_line import RunningCommand, call, refused, strict_json

RIGHT_ONE = CellVerdict("llama", "f32", RIGHT, "done")
FAILED_ONE = CellVerdict("mamba", "f32", FAILED, "capture", error="CaptureError", message="[no] form")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two element types, with everything it can write."""
    folder = tmp_path_factory.mktemp("zoo")
    (folder / "expected.toml").write_text('"opt:f32" = { outcome = "failed", stage = "capture", reason = "once" }\n')
    outcome = call(
        *("zoo", "run", "--only", "opt", "--dtype", "f32,q4_0", "--decode-steps", 4, "--jobs", 1),
        *("--results", folder / "out.jsonl", "--history", folder / "history", "--html", folder / "zoo.html"),
        *("--markdown", folder / "zoo.md", "--expected", folder / "expected.toml", "--update"),
    )
    assert outcome.code == 0, outcome
    assert "f32: 1 right of 1" in outcome.out and "All cases are as expected." in outcome.out
    return folder


def test_a_run_writes_what_it_found(finished: Path) -> None:
    f32, q4_0 = read_results([finished / "out.jsonl"])
    assert (f32.key, f32.outcome, f32.stage, f32.class_name) == ("opt:f32", RIGHT, "done", "OPTForCausalLM")
    assert (q4_0.key, q4_0.outcome) == ("opt:q4_0", RIGHT)
    assert list(f32.checks) == ["prefill", "chunked prefill", "decode", "greedy"]
    assert f32.max_abs_error is not None and 0 < f32.max_abs_error < 1e-4
    assert f32.checks["greedy"].tokens == 4
    assert f32.states == "DynamicCache"
    assert f32.versions["tract"] and f32.versions["torch"]
    assert f32.seconds > 0 and f32.peak_rss_bytes > 100e6
    assert "opt" not in (finished / "expected.toml").read_text()
    assert len(list((finished / "history").iterdir())) == 1
    assert "OPTForCausalLM" in (finished / "zoo.html").read_text()
    assert "| `opt` | OPTForCausalLM | ✓" in (finished / "zoo.md").read_text()


def test_a_pass_that_was_not_expected_fails_the_run(finished: Path) -> None:
    expected = finished / "wrong.toml"
    expected.write_text('"opt:f32" = { outcome = "failed", stage = "capture", reason = "a fact" }\n')
    outcome = call("zoo", "expect", finished / "out.jsonl", "--expected", expected)
    assert outcome.code == 1
    assert "unexpected pass: opt:f32: expected failed: a fact" in outcome.out
    assert call("zoo", "expect", finished / "out.jsonl", "--expected", expected, "--update").code == 0
    assert "opt" not in expected.read_text()
    assert call("zoo", "expect", finished / "out.jsonl", "--expected", expected).code == 0


def test_a_failure_without_a_row_fails_the_run(tmp_path: Path) -> None:
    write_results(tmp_path / "a.jsonl", [RIGHT_ONE, FAILED_ONE])
    expected = tmp_path / "expected.toml"
    outcome = call("zoo", "expect", tmp_path / "a.jsonl", "--expected", expected, "--json")
    assert outcome.code == 1
    assert [row["key"] for row in strict_json(outcome.out)["surprises"]] == ["mamba:f32"]
    assert call("zoo", "expect", tmp_path / "a.jsonl", "--expected", expected, "--update").code == 0
    assert expected.read_text().count("[no] form") == 1
    assert call("zoo", "expect", tmp_path / "a.jsonl", "--expected", expected).code == 0


def test_real_checkpoints_go_through_the_same_cell(tiny_llama: Path, tmp_path: Path) -> None:
    models = tmp_path / "models.txt"
    models.write_text(f"{tiny_llama}\n{tmp_path / 'missing'}\n")
    outcome = call(
        *("zoo", "run", "--models", models, "--decode-steps", 2, "--jobs", 1, "--json"),
        *("--results", tmp_path / "out.jsonl"),
    )
    assert outcome.code == 1, outcome  # one of them does not exist
    found = {verdict.architecture: verdict for verdict in read_results([tmp_path / "out.jsonl"])}
    assert (found[str(tiny_llama)].outcome, found[str(tiny_llama)].class_name) == (RIGHT, "LlamaForCausalLM")
    assert (found[str(tmp_path / "missing")].outcome, found[str(tmp_path / "missing")].stage) == (FAILED, "open")
    assert [cell["outcome"] for cell in strict_json(outcome.out)["cells"]] == [RIGHT, FAILED]


def test_a_cell_over_its_limits_is_a_verdict(tmp_path: Path) -> None:
    outcome = call(
        *("zoo", "run", "--only", "opt", "--max-memory", "50MB", "--no-expect", "--json"),
        *("--results", tmp_path / "out.jsonl"),
    )
    assert outcome.code == 1
    assert strict_json(outcome.out)["cells"][0]["outcome"] == "memory"


@needs_posix
def test_ctrl_c_ends_the_hosts_and_their_cells(tmp_path: Path) -> None:
    results = tmp_path / "out.jsonl"
    command = RunningCommand("zoo", "run", "--only", "opt,gpt2", "--jobs", 1, "--no-expect", "--results", results)
    command.wait_until(lambda: len(command.children("spawn_main")) >= 2)  # the host, and the cell forked from it
    command.press_ctrl_c()
    outcome = command.end()  # which asserts that no process is left
    assert outcome.code == 2, outcome
    assert "interrupted" in outcome.line("error")
    assert results.read_text() == ""


def test_differences_of_two_runs(tmp_path: Path) -> None:
    write_results(tmp_path / "a.jsonl", [RIGHT_ONE, FAILED_ONE])
    write_results(tmp_path / "b.jsonl", [RIGHT_ONE, replace(FAILED_ONE, outcome=RIGHT)])
    outcome = call("zoo", "diff", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert outcome.code == 0
    assert "fixed" in outcome.out and "failed [capture] -> right" in outcome.out
    outcome = call("zoo", "diff", tmp_path / "b.jsonl", tmp_path / "a.jsonl", "--json")
    assert outcome.code == 1
    assert [change["kind"] for change in strict_json(outcome.out)["changes"]] == ["broken"]
    outcome = call("zoo", "diff", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert (outcome.code, outcome.out.strip()) == (0, "Nothing changed.")


def test_shards_are_put_together(tmp_path: Path) -> None:
    write_results(tmp_path / "1.jsonl", [RIGHT_ONE])
    write_results(tmp_path / "2.jsonl", [FAILED_ONE])
    for _ in range(2):
        outcome = call(
            *("zoo", "report", tmp_path / "1.jsonl", tmp_path / "2.jsonl", "--html", tmp_path / "site" / "zoo.html"),
            *("--markdown", tmp_path / "zoo.md", "--expected", tmp_path / "none.toml"),
        )
        assert outcome.code == 0, outcome
        assert "f32: 1 right of 2" in outcome.out
    assert (tmp_path / "zoo.md").read_text().count("| `llama` |") == 1
    assert "[no] form" in (tmp_path / "site" / "zoo.html").read_text()


def test_the_architectures_are_listed() -> None:
    outcome = call("zoo", "list", "--json")
    assert outcome.code == 0
    assert strict_json(outcome.out)["architectures"]["llama"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "--only", "lama"), "lama"),
        (("run", "--dtype", "f8"), "f8"),
        (("run", "--shard", "0/3"), "0/3"),
        (("run", "--runner", "dask"), "dask"),
        (("run", "--max-memory", "much"), "much"),
        (("run", "--models", "no-such-file"), "no-such-file"),
        (("expect", "no-such-file"), "no-such-file"),
        (("diff", "no-such-file", "neither"), "no-such-file"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], word: str) -> None:
    refused(call("zoo", *arguments), word)


def test_the_script_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "nightly_zoo.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--dtype", "f8", "--json"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert "f8" in json.loads(capsys.readouterr().out)["message"]

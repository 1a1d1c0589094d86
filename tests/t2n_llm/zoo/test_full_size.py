"""Default configs in their real size: what is measured, the bar it is held against, the table, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from generic_export.errors import OptionError
from t2n_llm.zoo.cell import run_cell
from t2n_llm.zoo.configs import default_config
from t2n_llm.zoo.expectations import Expected, surprises
from t2n_llm.zoo.full_size import PEAK_BYTES, allowed_seconds, judged, layers_of
from t2n_llm.zoo.history import Run, read_results
from t2n_llm.zoo.overrides import FULL_SIZE_OVERRIDES
from t2n_llm.zoo.page import page
from t2n_llm.zoo.run import RunOptions
from t2n_llm.zoo.tables import FULL_SIZE_TABLE, full_size_markdown, markdown, replace_table, summary
from t2n_llm.zoo.tasks import architectures
from t2n_llm.zoo.verdict import FAILED, FULL_SIZE, OVER, RIGHT, Cell, CellVerdict
from tests.t2n_llm.command_line import call, refused

WITHIN = CellVerdict(
    "llama", FULL_SIZE, RIGHT, "done", "LlamaForCausalLM", layers=32, processor_seconds=15.0, peak_rss_bytes=800_000_000
)
SLOW = replace(WITHIN, architecture="slow", processor_seconds=100.0)
LARGE = replace(WITHIN, architecture="large", peak_rss_bytes=2 * PEAK_BYTES)
REFUSED = CellVerdict("mamba", FULL_SIZE, FAILED, "capture", error="CaptureError", message="no form")


def test_the_bar_is_half_a_second_a_layer_and_ten() -> None:
    assert allowed_seconds(32) == 26.0
    assert judged(WITHIN) == WITHIN
    assert judged(REFUSED) == REFUSED
    assert judged(SLOW).outcome == judged(LARGE).outcome == OVER
    assert "100 s of CPU time of 26" in judged(SLOW).message
    assert "3.00 GB of 1.5" in judged(LARGE).message
    assert judged(replace(SLOW, dtype="f32")).outcome == RIGHT


def test_a_cell_near_the_bar_is_no_surprise_on_either_side_of_it() -> None:
    near = replace(WITHIN, processor_seconds=27.0)
    row = {near.key: Expected(OVER, "done", "slow machine")}
    assert surprises([judged(near)], {}) == []
    assert surprises([replace(near, processor_seconds=24.0)], row) == []
    assert [surprise.kind for surprise in surprises([WITHIN], row)] == ["unexpected pass"]
    assert [surprise.kind for surprise in surprises([judged(SLOW)], {})] == ["unexpected failure"]


def test_the_table_has_marks_of_its_own() -> None:
    tiny = replace(WITHIN, dtype="f32", layers=0)
    run = Run("night", (tiny, WITHIN, judged(SLOW), REFUSED))
    table = full_size_markdown(run, {REFUSED.key: Expected(FAILED, "capture", "a fact")})
    assert summary(run)[1].startswith("full-size: 1 within the bar of 3")
    assert FULL_SIZE in page([run], {})
    assert "1 of 3 default configs are within the limit, 1 exceed it, 1 fail." in table
    assert "| `llama` | 32 | 15.0 s | 26.0 s | 0.80 GB | ✓ |" in table
    assert "| `mamba` | full-size | capture | a fact |" in table
    assert FULL_SIZE not in markdown(run, {})
    assert (full_size_markdown(Run("", (tiny,)), {}), markdown(Run("", (WITHIN,)), {})) == ("", "")
    document = replace_table(replace_table("# Zoo\n", "first"), table, FULL_SIZE_TABLE)
    changed = replace_table(document, "second", FULL_SIZE_TABLE)
    assert "first" in changed and "second" in changed and "`llama`" not in changed


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", 32), ("gpt2", 12), ("deepseek_v3", 61), ("gemma3", 26), ("bart", 12), ("mamba", 32)],
)
def test_layers_are_those_of_the_decoder(family: str, layers: int) -> None:
    assert layers_of(default_config(family)) == layers


def test_default_configs_are_those_of_causal_decoders() -> None:
    assert default_config("bert").is_decoder and not default_config("bert").add_cross_attention
    assert set(FULL_SIZE_OVERRIDES) <= set(architectures())


def test_real_checkpoints_have_no_such_column(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--full-size does not apply"):
        RunOptions(models=("folder",), dtypes=(FULL_SIZE,))
    models = tmp_path / "models.txt"
    models.write_text("folder\n")
    refused(call("zoo", "run", "--full-size", "--models", models), "--full-size does not apply")


def test_a_cell_measures_a_default_config(tmp_path: Path) -> None:
    with mock.patch.dict(FULL_SIZE_OVERRIDES, {"opt": {"num_hidden_layers": 1}}):
        verdict = run_cell(Cell("opt", FULL_SIZE), tmp_path, lambda _: None)
    assert (verdict.outcome, verdict.stage, verdict.class_name) == (RIGHT, "done", "OPTForCausalLM")
    assert (verdict.key, verdict.layers) == ("opt:full-size", 1)
    assert verdict.processor_seconds > 0.1 and verdict.peak_rss_bytes > 200e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_run_measures_a_default_config(tmp_path: Path) -> None:
    outcome = call(
        *("zoo", "run", "--full-size", "--only", "opt", "--jobs", 1, "--results", tmp_path / "out.jsonl"),
        *("--markdown", tmp_path / "zoo.md", "--html", tmp_path / "zoo.html"),
    )
    assert outcome.code == 0, outcome
    (verdict,) = read_results([tmp_path / "out.jsonl"])
    assert (verdict.key, verdict.class_name, verdict.layers) == ("opt:full-size", "OPTForCausalLM", 12)
    assert verdict.stage == "done" and verdict.processor_seconds > 0.5 and verdict.peak_rss_bytes > 200e6
    assert "full-size: 1 within the bar of 1" in outcome.out
    assert "| `opt` | 12 | " in (tmp_path / "zoo.md").read_text()
    assert "zoo table" not in (tmp_path / "zoo.md").read_text()
    assert FULL_SIZE in (tmp_path / "zoo.html").read_text()

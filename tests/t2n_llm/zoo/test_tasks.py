"""The zoo's tasks: what they list, what their cells are called, and what transformers runs of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from generic_export.errors import OptionError
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.configs import tiny_config
from t2n_llm.zoo.history import Run, read_results, write_results
from t2n_llm.zoo.page import page
from t2n_llm.zoo.run import RunOptions, plan_cells
from t2n_llm.zoo.suites.registry import rows_of_all
from t2n_llm.zoo.tables import markdown, summary, table_name
from t2n_llm.zoo.tasks import ALL, ZOO_TASKS, architectures, chosen_tasks
from t2n_llm.zoo.tiny_model import build_tiny_model, run_in_transformers
from t2n_llm.zoo.verdict import RIGHT, Cell, CellVerdict
from tests.t2n_llm.command_line import call, strict_json

SUMMARY = "text2text-generation"
BERT = CellVerdict("t5", "f32", RIGHT, "done", "T5ForConditionalGeneration", task=SUMMARY)


def test_every_task_lists_architectures_and_a_class_that_transformers_has() -> None:
    import transformers

    for name, row in ZOO_TASKS.items():
        assert architectures(name), name
        assert hasattr(transformers, row.auto_class), name


def test_tasks_are_chosen_by_name() -> None:
    assert chosen_tasks([]) == (TEXT_GENERATION,)
    assert chosen_tasks([ALL]) == tuple(ZOO_TASKS)
    assert chosen_tasks([SUMMARY, SUMMARY]) == (SUMMARY,)
    with pytest.raises(OptionError, match="not include the task 'juggling'"):
        chosen_tasks(["juggling"])


def test_cells_of_text_generation_keep_their_names() -> None:
    assert Cell("llama").key == "llama:f32"
    assert Cell("t5", "f16", SUMMARY).key == f"{SUMMARY}:t5:f16" == Cell("t5", "f16", SUMMARY).ended(RIGHT, "done").key
    assert {"llama", f"{SUMMARY}:t5"} <= rows_of_all()


def test_a_run_of_several_tasks_limits_each() -> None:
    known = {SUMMARY: ["zebra", "t5"], TEXT_GENERATION: ["llama", "zebra"]}
    options = RunOptions(tasks=(SUMMARY, TEXT_GENERATION), limit=1)
    assert [cell.key for cell in plan_cells(options, known)] == [f"{SUMMARY}:t5:f32", "llama:f32"]
    options = RunOptions(tasks=(SUMMARY, TEXT_GENERATION), only=("z*",))
    assert [cell.key for cell in plan_cells(options, known)] == [f"{SUMMARY}:zebra:f32", "zebra:f32"]


def test_default_configs_and_real_checkpoints_have_one_task() -> None:
    with pytest.raises(OptionError, match="text-generation only"):
        RunOptions(tasks=(SUMMARY,), dtypes=("full-size",))
    with pytest.raises(OptionError, match="one task"):
        RunOptions(tasks=(SUMMARY, TEXT_GENERATION), models=("org/model",))


def test_results_before_tasks_are_text_generation(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text('{"architecture": "llama", "dtype": "f32", "outcome": "right", "stage": "done"}\n')
    (verdict,) = read_results([file])
    assert (verdict.task, verdict.key) == (TEXT_GENERATION, "llama:f32")
    write_results(file, [verdict, BERT])
    assert read_results([file]) == [verdict, BERT]


def test_a_reader_sees_the_task() -> None:
    run = Run("2026-01-02T03-04-05", (BERT, CellVerdict("llama", "f32", RIGHT, "done")))
    assert summary(run) == [
        f"{SUMMARY}, f32: 1 right of 1 that run in transformers (of 1 architectures)",
        "f32: 1 right of 1 that run in transformers (of 1 architectures)",
    ]
    assert f"{SUMMARY}:t5" in page([run], {}) and f"<h2>{SUMMARY}, f32</h2>" in page([run], {})
    assert "| `t5` | T5ForConditionalGeneration | ✓ |" in markdown(run.of_task(SUMMARY), {})
    assert table_name(TEXT_GENERATION) == "zoo table" != table_name(SUMMARY)


def test_the_list_names_tasks() -> None:
    outcome = call("zoo", "list", "--task", f"{SUMMARY},text-generation", "--json")
    names = strict_json(outcome.out)["architectures"]
    assert names[f"{SUMMARY}:t5"] == "T5ForConditionalGeneration" and names["llama"] == "LlamaForCausalLM"
    assert list(names).index(f"{SUMMARY}:t5") < list(names).index("llama")


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        (SUMMARY, "t5"),
        (SUMMARY, "bart"),
        ("automatic-speech-recognition", "whisper"),
        ("image-to-text", "vision-encoder-decoder"),
    ],
)
def test_transformers_runs_tiny_models_of_other_tasks(task: str, architecture: str) -> None:
    model = build_tiny_model(architecture, 0, task)
    assert sum(parameter.numel() for parameter in model.parameters()) < 4_000_000
    assert run_in_transformers(model, task, 3) == "EncoderDecoderCache"


def test_encoders_are_no_decoders() -> None:
    assert tiny_config("bert").is_decoder
    assert not getattr(tiny_config("bert", "feature-extraction"), "is_decoder", False)
    assert tiny_config("vision-encoder-decoder", "image-to-text").decoder.is_decoder

"""Which cells a run has: fixed order, shards that are a partition, options that are refused early."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generic_export.errors import OptionError
from t2n_llm.tasks.names import TEXT_GENERATION
from t2n_llm.zoo.local import HostOptions
from t2n_llm.zoo.run import BEST_KNOWN, RunOptions, parse_shard, plan_cells, read_models, run_cells
from t2n_llm.zoo.verdict import Cell

NAMES = ["zebra", "llama", "mistral", "gpt2", "aardvark", "qwen3"]


def names(options: RunOptions, known: list[str] = NAMES) -> list[str]:
    return [cell.architecture for cell in plan_cells(options, {TEXT_GENERATION: known})]


def test_the_best_known_come_first() -> None:
    assert names(RunOptions()) == ["llama", "qwen3", "mistral", "gpt2", "aardvark", "zebra"]
    assert names(RunOptions(limit=2)) == ["llama", "qwen3"]


def test_the_best_known_exist() -> None:
    from t2n_llm.zoo.tasks import architectures

    assert len(BEST_KNOWN) == len(set(BEST_KNOWN)) >= 40
    assert [name for name in BEST_KNOWN if name not in architectures()] == []


def test_every_element_type_of_an_architecture_is_in_its_shard() -> None:
    cells = plan_cells(RunOptions(only=("llama", "g*"), dtypes=("f32", "q4_0")), {TEXT_GENERATION: NAMES})
    assert [cell.key for cell in cells] == ["llama:f32", "llama:q4_0", "gpt2:f32", "gpt2:q4_0"]


@given(st.integers(1, 20), st.sets(st.text(min_size=1), max_size=30))
def test_shards_are_a_partition(parts: int, known: set[str]) -> None:
    pieces = [names(RunOptions(shard=(part, parts)), sorted(known)) for part in range(1, parts + 1)]
    assert sorted(name for piece in pieces for name in piece) == sorted(known)


def test_a_shard_of_a_limited_run_is_a_part_of_it() -> None:
    whole = names(RunOptions(limit=4))
    pieces = [names(RunOptions(limit=4, shard=(part, 3))) for part in (1, 2, 3)]
    assert sorted(name for piece in pieces for name in piece) == sorted(whole)


@pytest.mark.parametrize("text", ["", "3", "a/b", "1/2/3", "-1/2", "1/-2"])
def test_a_shard_is_parsed(text: str) -> None:
    with pytest.raises(OptionError, match="shard"):
        parse_shard(text)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0"])
def test_a_shard_exists(text: str) -> None:
    with pytest.raises(OptionError, match="shard"):
        RunOptions(shard=parse_shard(text))


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="bf16"):
        RunOptions(dtypes=("f32", "bf16"))
    with pytest.raises(OptionError, match="dask"):
        RunOptions(engine="dask")
    with pytest.raises(OptionError, match="lama"):
        names(RunOptions(only=("llama", "lama")))


def test_real_checkpoints_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "models.txt"
    file.write_text(f"# ours\norg/model\norg/model@abc123  # pinned\n\n{tmp_path}\norg/model\n")
    lines = read_models(file)
    assert lines == ("org/model", "org/model@abc123", str(tmp_path))
    cells = plan_cells(RunOptions(models=lines, dtypes=("f16",)), {})
    assert [(cell.model, cell.revision) for cell in cells] == [
        ("org/model", None),
        ("org/model", "abc123"),
        (str(tmp_path), None),
    ]
    assert cells[1].key == "org/model@abc123:f16"


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
def test_a_file_without_models_is_refused(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "models.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match=r"models\.txt"):
        read_models(file)


def test_cells_travel_between_processes() -> None:
    cell = Cell("a", "q4_0", "org/model", "main", 3, 7, 1.5, 12)
    assert pickle.loads(pickle.dumps(cell)) == cell


def test_the_local_engine_runs_them() -> None:
    options = RunOptions(only=("good", "absent"), hosts=HostOptions("tests.t2n_llm.zoo.fake_cells"), jobs=2)
    verdicts = run_cells(plan_cells(options, {TEXT_GENERATION: ["good", "absent", "killed"]}), options)
    assert sorted((verdict.architecture, verdict.outcome) for verdict in verdicts) == [
        ("absent", "not runnable"),
        ("good", "right"),
    ]

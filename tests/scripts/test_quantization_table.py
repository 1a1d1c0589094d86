"""The table of algorithms: its arithmetic, its permutation, and a small run."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from generic_export.errors import OptionError
from t2n_llm.inspect.quality import compare_windows, windows_of
from tests.load_script import load_script
from tests.trained_model import REAL_MODEL

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quantization_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("quantization_table")


def test_divergence_agreement_and_perplexity(script):
    expected = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    actual = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    found = compare_windows([[0, 1, 1]], script._given([expected]), script._given([actual]))
    kl, top1, perplexity = found.mean_kl_divergence, found.same_top1_share, found.perplexity
    assert kl == pytest.approx((0.5 * 0.6931472 - 0.25 * 0.6931472) / 2, rel=1e-5)
    assert top1 == 0.5
    assert perplexity == pytest.approx((0.5 * 0.8) ** -0.5, rel=1e-5)


def test_windows_are_spread_over_the_text(script):
    windows = windows_of(list(range(1000)), 8, script.WINDOW)
    assert [len(window) for window in windows] == [384, 384]
    assert [window[0] for window in windows] == [0, 500]
    with pytest.raises(OptionError, match="100 tokens"):
        windows_of(list(range(100)), 8, script.WINDOW)


@pytest.mark.nightly
def test_a_small_table_and_its_continuation(script, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    argv = ["--model", str(REAL_MODEL), "--windows", "1", "--embeddings", "--work", str(tmp_path), "--json", str(file)]
    assert script.main([*argv, "--algorithms", "min_max"]) == 0
    first = file.read_text()
    file.write_text(first + '{"name": "sea')  # what a killed run leaves
    file.write_text(file.read_text() + "\n")
    assert script.main([*argv, "--algorithms", "min_max,search"]) == 0
    lines = file.read_text().splitlines()
    assert file.read_text().startswith(first) and len(lines) == len(first.splitlines()) + 3
    table = {row["name"]: row for row in map(json.loads, [*first.splitlines(), *lines[-2:]])}
    assert list(table) == ["f32", "f16", "min_max", "min_max+embeddings", "search", "search+embeddings"]
    assert table["f32"]["kl"] == 0.0 and table["f32"]["top1"] == 1.0
    assert abs(table["f16"]["kl"]) < 1e-4
    assert table["min_max"]["kl_ratio"] == 1.0
    assert table["search"]["kl_ratio"] == pytest.approx(table["search"]["kl"] / table["min_max"]["kl"])
    assert table["min_max+embeddings"]["kl"] > table["min_max"]["kl"] > 1e-4
    assert "| search " in capsys.readouterr().out


@pytest.mark.nightly
def test_rows_of_another_setting_are_measured_again(script, tmp_path):
    file = tmp_path / "rows.jsonl"
    row = script.Row("f16", 0.5, None, 0.5, 2.0, 1.0)
    script.append_row(file, row, "here")
    assert script.read_rows(file, "here") == {"f16": row}
    assert script.read_rows(file, "elsewhere") == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "absent"], "no model there"),
        (["--model", str(REAL_MODEL), "--algorithms", "magic"], "unknown algorithm magic"),
        (["--model", str(REAL_MODEL), "--text", "absent.txt"], "absent.txt"),
    ],
)
def test_what_cannot_be_measured_is_said_on_one_line(script, argv, message, capsys):
    assert script.main(argv) == 1
    assert message in capsys.readouterr().err

"""scripts/models_tables.py: rows go to CSV files, and the pages have what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from t2n_llm.zoo.history import write_results
from t2n_llm.zoo.tables import ZOO_TABLE, replace_table
from t2n_llm.zoo.verdict import FAILED, RIGHT, CellVerdict, Check
from tests.load_script import load_script

script = load_script("models_tables")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    page = tmp_path / "models.md"
    page.write_text(replace_table("# Models\n", "old\n", ZOO_TABLE))
    results = tmp_path / "results.jsonl"
    llama = CellVerdict(
        "llama", "f32", RIGHT, "done", class_name="LlamaForCausalLM", checks={"prefill": Check(2e-6, 1.0, 1, 1, True)}
    )
    xlm = CellVerdict("xlm", "f32", FAILED, "capture", class_name="XLMModel")
    write_results(results, [llama, xlm])
    assert script.main([str(results), "--document", str(page)]) == 0
    return page


def test_a_row_per_architecture_is_in_the_csv_file(document: Path) -> None:
    rows = (document.parent / "models.csv").read_text()
    assert rows.splitlines() == [
        "architecture,class,f32",
        "llama,LlamaForCausalLM,✓ 2e-06",
        "xlm,XLMModel,failed (capture)",
    ]
    assert script.supported(rows) == ["llama"]


def test_the_page_has_figures_and_reasons(document: Path) -> None:
    text = document.read_text()
    assert "1 right of 2" in text and "[models.csv](models.csv)" in text and "old" not in text
    assert "| `xlm` | f32 | capture |" in text and "| `llama` |" not in text


def test_the_supported_models_are_those_of_the_csv_file(tmp_path: Path) -> None:
    page = tmp_path / "supported.md"
    page.write_text(script.SUPPORTED.read_text())
    script.list_supported((script.DOCUMENT.parent / "models.csv").read_text(), page)
    assert page.read_text() == script.SUPPORTED.read_text()
    assert page.read_text().count("`, `") > 180


def test_modules_of_libraries_have_a_table_and_a_file_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    text = replace_table("# Models\n", "old\n", ZOO_TABLE)
    page.write_text(replace_table(text, "old\n", script.MODULES_TABLE))
    results = tmp_path / "results.jsonl"
    checks = {"B = 2, H = 128, W = 128": Check(2e-6, 1.0, 0, 0, True)}
    versions = {"timm": "1.0"}
    mobilevit = CellVerdict(
        "mobilevit",
        "dynamic",
        RIGHT,
        "done",
        class_name="ByobNet",
        task="timm",
        checks=checks,
        processor_seconds=3.5,
        versions=versions,
    )
    tiny_vit = CellVerdict(
        "tiny_vit of any size", "dynamic", FAILED, "export", class_name="TinyVit", message="a branch", task="timm"
    )
    bert = CellVerdict("bert", "f32", RIGHT, "done", class_name="BertModel", task="fill-mask")
    write_results(results, [mobilevit, tiny_vit, bert])
    assert script.main([str(results), "--document", str(page)]) == 0
    rows = (tmp_path / "modules.csv").read_text().splitlines()
    assert rows[1] == "fill-mask,bert,BertModel,of the task,,right,,,"
    assert rows[2] == 'timm,mobilevit,ByobNet,B H (64n) W (64n),"B = 2, H = 128, W = 128",right,2.0e-06,3.5,'
    assert rows[3].startswith("timm,tiny_vit of any size,TinyVit,B H W,,failed,,,")
    lines = page.read_text().splitlines()
    assert "| timm 1.0 | 2 |  | 1 of 2 | `tiny_vit of any size` |" in lines
    assert next(line for line in lines if line.startswith("| encoders")).endswith("| 1 |  | 1 of 1 |  |")
    assert "old" in lines  # the table of language models is another run's

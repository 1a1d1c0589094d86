"""scripts/compatibility_versions.py: the sets of versions it makes, the table it writes, and that the document has one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.load_script import load_script

ROOT = Path(__file__).parents[2]
versions = load_script("compatibility_versions")
USUAL = "torch==2.13.0\ntransformers==5.23.0\ntokenizers==0.23.3\nhuggingface-hub==2.4.0\nnumpy==2.4.6\n"


def test_a_set_of_versions_changes_one() -> None:
    assert versions.constraints(USUAL, "torch", "2.10.0") == USUAL.replace("torch==2.13.0\n", "") + "torch==2.10.0\n"
    assert (
        versions.constraints(USUAL, "transformers", "5.16.1") == "torch==2.13.0\nnumpy==2.4.6\ntransformers==5.16.1\n"
    )
    assert versions.constraints(USUAL, "python", "3.12") == USUAL


def test_the_last_word_on_a_cell_counts_and_the_section_is_replaced(tmp_path: Path) -> None:
    results, document = tmp_path / "results.jsonl", tmp_path / "document.md"
    lines = [
        {"package": "transformers", "version": "5.9.0", "outcome": "failed", "reason": "error: no"},
        {"package": "transformers", "version": "5.16.1", "outcome": "passed", "versions": {"torch": "2.13.0"}},
        {"package": "transformers", "version": "5.9.0", "outcome": "refused"},
        {"package": "python", "version": "3.14", "outcome": "not run"},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    document.write_text(f"# Head\n\n{versions.SECTION}\n\nold\n")
    versions.write_section(document, list(versions.section(versions.read_cells(results))))
    text = document.read_text()
    assert text.startswith("# Head\n\n## ") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith(("| transformers", "| torch", "| python"))]
    assert rows[0] == "| transformers | 5.9.0 |  | *refused* |"
    assert "| transformers | 5.16.1 | torch 2.13.0 | ✓ |" in rows
    assert rows[-1] == "| python | 3.14 |  | not run here |"
    assert len(rows) == 1 + len(versions.TRANSFORMERS) + len(versions.TORCH) + len(versions.PYTHONS)


def test_why_a_smoke_failed() -> None:
    assert versions.reason("a\n  15.7 s  Reading\nerror: no cache\n hint: none\n") == "error: no cache"
    assert versions.reason("a\nlast\n") == "last"


def test_the_document_has_the_section() -> None:
    text = (ROOT / "docs" / "measurements" / "compatibility.md").read_text()
    assert versions.SECTION in text
    assert "**failed**" not in text

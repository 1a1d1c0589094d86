"""scripts/compatibility.py: the table it writes, missing engines, and that docs/measurements/compatibility.md is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from generic_export.errors import EngineMissingError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.releases.dialect import RELEASES
from tests.load_script import load_script

ROOT = Path(__file__).parents[2]


compatibility = load_script("compatibility")


@pytest.mark.nightly
def test_a_table_of_one_module_in_both_engines(tmp_path: Path) -> None:
    try:
        TractCli()
    except EngineMissingError as error:
        pytest.skip(str(error))
    output = tmp_path / "table.md"
    assert compatibility.main(["--versions", "0.23.9", "--only", "silu", "--output", str(output)]) == 0
    lines = output.read_text().splitlines()
    assert "| module | wheel 0.23.9 | command 0.23.9 |" in lines
    assert "| silu, hardswish | ✓ | ✓ |" in lines and "| **passed** | 1 of 1 | 1 of 1 |" in lines


@pytest.mark.nightly
def test_a_refusal_is_told_with_its_reason(tmp_path: Path) -> None:
    if isinstance(compatibility.columns(["0.22.4"])[0].engine, str):
        pytest.skip("the wheel of tract 0.22.4 is not installed")
    output = tmp_path / "table.md"
    assert compatibility.main(["--versions", "0.22.4", "--only", "grid", "--output", str(output)]) == 0
    text = output.read_text()
    assert "| grid_sample | refused |" in text
    assert "* grid_sample, wheel 0.22.4: tract_core_grid_sample at (root): tract 0.22.4 does not have it" in text


def test_a_missing_engine_is_told_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compatibility.main(["--versions", "0.23.999", "--output", str(tmp_path / "table.md")]) == 2
    assert "0.23.999" in capsys.readouterr().err and not (tmp_path / "table.md").exists()


def test_the_document_covers_every_engine_and_nothing_is_wrong() -> None:
    text = (ROOT / "docs" / "measurements" / "compatibility.md").read_text()
    titles = [*(f"wheel {version}" for version in RELEASES), f"command {RELEASES[-1]}"]
    assert f"| module | {' | '.join(titles)} |" in text
    names = [case.name for case in compatibility.smoke.CASES]
    assert len(names) >= 30 and all(f"\n| {name} | " in text for name in names)
    assert "## Wrong" not in text

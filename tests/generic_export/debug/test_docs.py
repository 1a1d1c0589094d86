"""What docs/how-to/piece-by-piece.md shows runs as it stands, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from generic_export.debug.piece_by_piece.exporters import EXPORTERS
from generic_export.diagnose.piece_by_piece import ModelDiagnoseOutput

DOC = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "piece-by-piece.md"


@pytest.mark.filterwarnings("ignore")
def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", DOC.read_text(), re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "text"] * 3
    names: dict[str, object] = {"__name__": "docs"}
    for (_, code), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        exec(compile(code, "block.py", "exec"), names)
        assert capsys.readouterr().out.strip() == shown.strip()


def test_every_name_of_a_node_and_every_exporter_is_listed() -> None:
    text = DOC.read_text()
    public = {name for name in vars(ModelDiagnoseOutput) if not name.startswith("_")} - {"true_model_name"}
    missing = {name for name in (*public, *EXPORTERS) if f"`{name}" not in text}
    assert not missing

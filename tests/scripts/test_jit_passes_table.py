"""scripts/jit_passes_table.py and docs/how-to/torchscript.md: the snippets run, the table is the one that the script writes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.load_script import load_script

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "torchscript.md"

script = load_script("jit_passes_table")


def snippets() -> tuple[str, str]:
    """Return the document's Python: what needs no model, and what needs silero_vad.jit."""
    found = re.findall(r"(<!-- needs: silero_vad\.jit -->\n)?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return tuple("\n".join(code for needs, code in found if bool(needs) is needed) for needed in (False, True))  # type: ignore[return-value]


@pytest.fixture
def silero() -> Path:
    file: Path = script.default_script()
    if not file.is_file():
        pytest.skip(f"no {file}: run scripts/fetch_test_models.py silero-vad (PyPI, 11 MB)")
    return file


def run(code: str, folder: Path, names: dict[str, object]) -> None:
    (folder / "snippet.py").write_text(code)  # torch.jit.script reads the source of its class
    exec(compile(code, str(folder / "snippet.py"), "exec"), names)


def test_the_snippets_of_the_document_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, _ = snippets()
    run(plain, tmp_path, {"__name__": "snippet"})
    assert (tmp_path / "gate.nnef.tar").is_file()
    assert capsys.readouterr().out.startswith("{'froze': True, 'replace_size_calls_with_constants': 1, ")


def test_the_snippet_on_silero_vad_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silero: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silero_vad.jit").symlink_to(silero)
    plain, needing = snippets()
    run(plain + needing, tmp_path, {"__name__": "snippet"})
    assert (tmp_path / "vad.nnef.tar").is_file()


@pytest.mark.nightly
def test_the_documents_table_is_what_the_script_writes(tmp_path: Path, silero: Path) -> None:
    copy = tmp_path / "jit.md"
    before, begin, rest = DOCUMENT.read_text().partition(script.BEGIN)
    copy.write_text(before + begin + "\n" + script.END + rest.partition(script.END)[2])
    assert script.main(["--document", str(copy)]) == 0
    assert copy.read_text() == DOCUMENT.read_text()


def test_the_table_of_a_small_script() -> None:
    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool(x.sum() > 0) else x

    x = (torch.ones(3),)
    small = torch.jit.script(Small().eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        text = script.table([script.Case("frozen", small, x), script.Case("not", small, x, freeze=False)])
    lines = text.splitlines()
    assert len(lines) == 2 + 1 + 1 + 8
    assert lines[2] == "| as loaded, calls inlined |  | 5 | 1 |  | 5 | 1 |"
    assert lines[-1] == "| `fold_data_dependent_ifs` | 1 | 1 | 0 | 1 | 1 | 0 |"


def test_a_missing_model_and_a_document_without_marks_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script.main(["--script", str(tmp_path / "none.jit")]) == 1
    assert "not there. Run scripts/fetch_test_models.py silero-vad." in capsys.readouterr().err
    (tmp_path / "there.jit").touch()
    (tmp_path / "empty.md").touch()
    monkeypatch.setattr(script, "cases", lambda _: [])
    monkeypatch.setattr(script, "table", lambda _: "")
    assert script.main(["--script", str(tmp_path / "there.jit"), "--document", str(tmp_path / "empty.md")]) == 1
    assert "no <!-- jit_passes_table: begin -->" in capsys.readouterr().err

"""What docs/how-to/remodel.md shows runs as it stands, and prints what it says; so does the example."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from generic_export.remodel import load_plan, parse_plan, plan_of_archive

ROOT = Path(__file__).resolve().parents[3]


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "how-to" / "remodel.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    snippets = blocks("python")
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "docs/how-to/remodel.md", "exec"), names)
    (shown,) = blocks("text")
    assert capsys.readouterr().out.strip() == shown.strip()
    assert (tmp_path / "archives" / "encoder.nnef.tar").exists()


def test_the_plans() -> None:
    (text,) = blocks("yaml")
    plan = parse_plan(text)
    assert list(plan.subgraphs) == ["encoder", "decoder", "joint"]
    assert plan.subgraphs["encoder"].constraints["T"].max == 39993
    for snippet in blocks("py"):
        compile(snippet, "docs/how-to/remodel.md", "exec")


def said_by(example: str, folder: Path) -> list[str]:
    """Run an example in a process of its own; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "examples" / example, folder],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(Path.home())},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_says_the_same_tokens_in_tract_and_pytorch(tmp_path: Path) -> None:
    lines = said_by("rnnt_transcription.py", tmp_path)
    assert [line.split()[0] for line in lines] == ["8", "57", "200"] and all("as PyTorch" in line for line in lines)
    tokens = lines[-1].split(": ")[1].split()
    assert len(tokens) == 16 and len(set(tokens)) > 2  # a transcript, not one token again and again
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.nnef.tar" for name in ("encoder", "decoder", "joint")
    }
    plan = load_plan(ROOT / "examples" / "rnnt_transcription.yaml")
    for name, one in plan.subgraphs.items():
        found = plan_of_archive(tmp_path / f"{name}.nnef.tar")
        assert found is not None and found.subgraphs == {name: one}


@pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="nemo_toolkit[asr] is not installed")
def test_nemos_recognisers_say_the_same_in_tract(tmp_path: Path) -> None:
    lines = said_by("nemo_asr.py", tmp_path)[-4:]
    assert all("as NeMo: ctc" in line for line in lines[:3]) and "in chunks of 16, as PyTorch" in lines[3]


def test_the_plan_of_nemos_recognisers() -> None:
    plan = load_plan(ROOT / "examples" / "nemo_asr.yaml")
    assert list(plan.subgraphs) == ["preprocessor", "encoder", "ctc", "decoder", "joint", "joint_tdt"]

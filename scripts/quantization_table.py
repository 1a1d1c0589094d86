#!/usr/bin/env python3
"""Measure what each 4-bit algorithm costs in quality: KL to f32, top-1 agreement and perplexity on held-out text.

usage: scripts/quantization_table.py [--model DIR|FILE.gguf] [--text FILE] [--calibration FILE] [--algorithms A,B,...]
                                     [--engine torch|tract] [--embeddings] [--no-permute] [--windows N] [--work DIR]
                                     [--json FILE.jsonl]

model         by default SmolLM2-135M-Instruct as scripts/fetch_test_models.py makes it. Its weights come from a 4-bit file;
              so its channels are permuted first, consistently everywhere: the function stays the same (checked on logits),
              and the groups of 32 are no longer those of the old grid. A GGUF file is de-quantised first.
torch         rounds the weights in memory and runs PyTorch in f32: fast, to compare algorithms.
tract         exports an f16 archive for every row and runs it in the engine: what a user gets. Rows f32 and f16 too. One
              archive and one engine process at a time; a window is one run, as the archives give all logits.
--embeddings  also measures every algorithm with embeddings and head in 4 bits.
--json        gets a line for each row as soon as it is measured; rows that are in it already are not measured again, if they
              come from the same model, text, windows, calibration and engine. With --work the logits of f32 are kept as well.

Perplexity is of windows of 384 tokens, evenly spread over the text; the first token of a window is not scored. KL is the
mean over scored positions of KL(f32 || row), relative to the row `min_max` (plain signed-maximum Q4_0).
Run it with the project's environment: .venv/bin/python scripts/quantization_table.py --engine tract
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from measured_model import NoModelError, add_model_arguments, measured_model, work_folder

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

PLAIN = ("f32", "f16")
BASELINE = "min_max"
WINDOW = 384
_EMBEDDINGS = "+embeddings"


class TableError(Exception):
    """The table cannot be made; the message says why, on one line."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: algorithm, with `+embeddings` when these are quantised too.
        kl: mean KL(f32 || row), in nats.
        kl_ratio: relative to `min_max` without embeddings; None when that row is not there.
        top1: share of positions with the same most likely token.
        perplexity: on the scored tokens.
        seconds: to quantise (and export).
    """

    name: str
    kl: float
    kl_ratio: float | None
    top1: float
    perplexity: float
    seconds: float


# Gives, for the name of a row, what predicts a window: the logits after each of its tokens but the last.
Measure = Callable[[str], AbstractContextManager[Callable[[Sequence[int]], Any]]]


def torch_measure(folder: Path, calibration: str) -> Measure:
    """Return a measure that rounds weights and runs PyTorch in f32."""
    import torch
    from transformers import AutoModelForCausalLM

    from t2n_llm.inspect.quality import torch_predict

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    original = {name: values.clone() for name, values in model.state_dict().items()}

    @contextmanager
    def measure(name: str) -> Iterator[Any]:
        with torch.no_grad():
            for key, values in original.items():
                model.state_dict()[key].copy_(values)
            _round_weights(model, folder, name, calibration)
        yield torch_predict(model)

    return measure


def _round_weights(model: Any, folder: Path, name: str, calibration: str) -> None:
    """Replace, in place, a model's weights by the values that a row would store."""
    algorithm, _, embeddings = name.partition("+")
    state = model.state_dict()
    if algorithm == "f32":
        return
    if algorithm == "f16":
        for values in state.values():
            values.copy_(values.half())
        return
    names = [key for key in state if state[key].ndim == 2 and (embeddings or _is_linear_of_layer(key))]
    from quant.algorithms import BUILT_IN

    if algorithm in BUILT_IN:
        for key in names:
            state[key].copy_(BUILT_IN[algorithm].quantize(state[key].clone()).dequantize())
        return
    _calibrate_into(state, folder, algorithm, set(names), calibration)


def _is_linear_of_layer(name: str) -> bool:
    return name.endswith("_proj.weight")


def _calibrate_into(state: dict[str, Any], folder: Path, algorithm: str, names: set[str], calibration: str) -> None:
    from generic_export.weights.values import read_tensor
    from quant.packing import unpack_q4_0
    from t2n_llm.compress.algorithms import CALIBRATED
    from t2n_llm.compress.calibration import TextCalibration
    from t2n_llm.source.hub import open_source

    with tempfile.TemporaryDirectory(prefix="t2n-table-") as work:
        result = TextCalibration(open_source(str(folder)), calibration).quantized(
            dict.fromkeys(names, CALIBRATED[algorithm]), Path(work), lambda _: None
        )
        for key, source in result.packed.items():
            state[key].copy_(unpack_q4_0(read_tensor(source)).dequantize())
        for key, source in result.changed.items():
            state[key].copy_(read_tensor(source))


def tract_measure(folder: Path, calibration: str, work: Path) -> Measure:
    """Return a measure that exports an archive for every row and asks tract."""
    from t2n_llm.check.runner import WheelRunner
    from t2n_llm.export.pipeline import export_llm
    from t2n_llm.inspect.quality import ArchiveReading, engine_predict

    @contextmanager
    def measure(name: str) -> Iterator[Any]:
        algorithm, _, embeddings = name.partition("+")
        plain = algorithm in PLAIN
        recipe = None if plain else f"q4_0{'+embeddings' if embeddings else ''}:{algorithm}"
        output = work / f"archive-{name}"
        result = export_llm(
            str(folder),
            output,
            dtype=algorithm if plain else "f16",
            compress=recipe,
            calibration=calibration,
            check=False,
            archive="dir",
            force=True,
            num_logits_to_keep=0,
        )
        try:
            with WheelRunner(result.archive) as runner:
                yield engine_predict(runner, ArchiveReading(0))
        finally:
            shutil.rmtree(output, ignore_errors=True)

    return measure


def table(
    measure: Measure,
    windows: Sequence[Sequence[int]],
    names: Sequence[str],
    known: dict[str, Row] | None = None,
    keep: Path | None = None,
) -> Iterator[Row]:
    """Yield the rows, f32 first: it is what the others are compared with.

    Args:
        measure: gives what predicts in a row.
        windows: token ids.
        names: of the rows.
        known: rows that need not be measured again.
        keep: file for the logits of f32; those in it are used.
    """
    from t2n_llm.inspect.quality import compare_windows

    known = known or {}
    reference: list[Any] | None = None
    baseline: float | None = None
    for name in ("f32", *(name for name in names if name != "f32")):
        row = known.get(name)
        if row is None:
            started = time.monotonic()
            reference = reference or _reference(measure, windows, keep)
            with nullcontext(_given(reference)) if name == "f32" else measure(name) as predict:
                found = compare_windows(windows, _given(reference), predict)
            row = Row(
                name,
                found.mean_kl_divergence,
                None,
                found.same_top1_share,
                found.perplexity,
                time.monotonic() - started,
            )
        baseline = row.kl if name == BASELINE else baseline
        yield replace(row, kl_ratio=row.kl / baseline if baseline else None)


def _given(rows: Sequence[Any]) -> Callable[[Sequence[int]], Any]:
    """Return what predicts window after window what was predicted before."""
    remaining = iter(rows)
    return lambda window: next(remaining)


def _reference(measure: Measure, windows: Sequence[Sequence[int]], keep: Path | None) -> list[Any]:
    """Return the logits of f32 for each window, from the file where they were kept if they are there."""
    import torch

    if keep is not None and keep.is_file():
        return list(torch.load(keep, weights_only=True))
    with measure("f32") as predict:
        reference = [predict(window) for window in windows]
    if keep is not None:
        partial = keep.with_name(keep.name + ".partial")
        torch.save(reference, partial)
        partial.replace(keep)
    return reference


def read_rows(path: Path | None, setting: str) -> dict[str, Row]:
    """Return the rows of a JSON-lines file that were measured in the same setting; a line cut short is passed over."""
    rows: dict[str, Row] = {}
    if path is None or not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.pop("setting", None) == setting:
            rows[record["name"]] = Row(**record)
    return rows


def append_row(path: Path, row: Row, setting: str) -> None:
    """Add a row to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row) | {"setting": setting}) + "\n")


def row_names(algorithms: Sequence[str], embeddings: bool) -> list[str]:
    """Return the names of the rows, in order."""
    names = [*PLAIN, *algorithms]
    return names + [algorithm + _EMBEDDINGS for algorithm in algorithms] if embeddings else names


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--algorithms", help="with commas (default: all)")
    parser.add_argument("--engine", choices=("torch", "tract"), default="torch")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args(argv)


def _print_row(row: Row) -> None:
    ratio = f"{row.kl_ratio:6.3f}" if row.kl_ratio is not None else "     -"
    print(
        f"| {row.name:20s} | {row.kl:8.4f} | {ratio} | {100 * row.top1:5.1f} % | {row.perplexity:8.2f} "
        f"| {row.seconds:6.0f} |",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    options = _arguments(argv)
    try:
        _run(options)
    except (TableError, NoModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    from quant.algorithms import BUILT_IN
    from t2n_llm.compress.algorithms import CALIBRATED

    known = (*BUILT_IN, *CALIBRATED)
    algorithms = options.algorithms.split(",") if options.algorithms else known
    unknown = set(algorithms) - set(known)
    if unknown:
        raise TableError(f"unknown algorithm {min(unknown)}; there are {', '.join(known)}.")
    names = row_names(algorithms, options.embeddings)
    with work_folder(options.work) as work:
        folder = measured_model(options.model, work, permute=not options.no_permute)
        windows = windows_of_text(folder, options.text, options.windows)
        setting = _setting(options, folder, windows)
        keep = work / f"f32-{setting}.pt" if options.work is not None else None
        measured = read_rows(options.json, setting)
        print(f"{options.model.name}, {len(windows) * (WINDOW - 1)} tokens scored, engine {options.engine}")
        print("| row                  |       KL |  ratio |   top-1 | perplexity | seconds |")
        print("|---|---|---|---|---|---|")
        for row in table(_measure(options, folder, work), windows, names, measured, keep):
            _print_row(row)
            if options.json is not None and row.name not in measured:
                append_row(options.json, row, setting)


def _measure(options: argparse.Namespace, folder: Path, work: Path) -> Measure:
    """Return the measure of the engine asked for; the model is loaded when a row is first measured."""

    @cache
    def made() -> Measure:
        if options.engine == "tract":
            return tract_measure(folder, options.calibration, work)
        return torch_measure(folder, options.calibration)

    return lambda name: made()(name)


def _setting(options: argparse.Namespace, folder: Path, windows: Sequence[Sequence[int]]) -> str:
    """Return a short name for everything but the row that decides a figure: engine, weights, tokens, calibration text."""
    from generic_export.files import sha256

    calibration = Path(options.calibration)
    digest = hashlib.sha256(json.dumps([options.engine, [list(window) for window in windows]]).encode())
    digest.update(calibration.read_bytes() if calibration.is_file() else options.calibration.encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(sha256(path).encode())
    return digest.hexdigest()[:12]


def windows_of_text(folder: Path, text: Path, count: int) -> list[list[int]]:
    """Return the windows of a text, in a model's tokens, each begun as its tokenizer begins a text.

    Raises:
        TableError: the text cannot be read, or is too short.
    """
    from generic_export.errors import OptionError
    from t2n_llm.compress.text import read_text
    from t2n_llm.inspect.quality import windows_of_text as cut
    from t2n_llm.source.hub import load_tokenizer

    try:
        return cut(load_tokenizer(folder), read_text(text, "text"), count, WINDOW)
    except OptionError as error:
        raise TableError(error.message) from error


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

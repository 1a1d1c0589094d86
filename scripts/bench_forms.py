#!/usr/bin/env python3
"""Measure the forms of a language model's graph beside each other: activations in f16 or f32, attention as operator or products.

usage: scripts/bench_forms.py [MODEL] [--size 1B|3B] [--forms f16-sdpa,f32-products] [--compress RECIPE,...] [--past 64,512,2048]
                              [--chunk 512] [--repeat N] [--json]

MODEL is a checkpoint folder or hub id; by default SmolLM2-135M-Instruct of scripts/fetch_test_models.py. With --size, random
weights in the shape of a Llama 3 (`random_llama.py`). Each form is exported without a check, with each of the recipes, and all of
them are then measured in turn in one process, on one thread, with the cache as the engine's state: tokens a second while the past
is fed in chunks, and milliseconds a token after it. Both are the processor's time, so that other work on the machine disturbs
little; read the ratios to the first row. `q4_0x2@f16` is that recipe with --weights-in-memory f16. The last column is how fast
decoding reads weights and caches, beside what a thread here can read.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_llama import SHAPES, write_checkpoint

from generic_export.read.contents import read_contents
from generic_export.read.outline import read_outline
from t2n_llm import export_llm
from t2n_llm.bench.machine_limits import measured_limits
from t2n_llm.bench.traffic import bytes_read

FORMS = ("f16-sdpa", "f16-products", "f32-sdpa", "f32-products")
STEPS = 8
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
DEFAULT_MODEL = CACHE / "t2n-llm" / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    """Export, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEFAULT_MODEL))
    parser.add_argument("--size", choices=SHAPES, help="a random checkpoint in the shape of Llama 3, instead of MODEL")
    parser.add_argument("--forms", default=",".join(FORMS), help="activations and attention, comma-separated")
    parser.add_argument(
        "--compress", type=lambda text: text.split(","), default=["f16"], help="recipes, comma-separated"
    )
    parser.add_argument("--past", default="64,512,2048", help="tokens in the cache, comma-separated")
    parser.add_argument("--chunk", type=int, default=512, help="tokens fed at once")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lengths = [int(length) for length in options.past.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if options.size is not None:
            options.model = str(Path(folder) / "checkpoint")
            write_checkpoint(Path(options.model), SHAPES[options.size])
        models = {
            f"{form}-{recipe}" if len(options.compress) > 1 else form: loaded(
                options, Path(folder) / form, form, recipe
            )
            for form in options.forms.split(",")
            for recipe in options.compress
        }
        rows = [row for length in lengths for row in measured(models, length, options.chunk, options.repeat)]
    limit = measured_limits().bytes_per_second
    print(json.dumps({"bytes_per_second": limit, "rows": rows}) if options.json else table(rows, limit))


@dataclass(frozen=True)
class Form:
    """One exported form, ready to run.

    Attributes:
        runnable: tract's model, its caches as state.
        reads: bytes of weights and caches that a decoding step reads, by the number of past tokens.
    """

    runnable: Any
    reads: Callable[[int], float]


def loaded(options: argparse.Namespace, folder: Path, form: str, recipe: str) -> Form:
    """Export one form, and return the model that runs it."""
    import tract

    activations, attention = form.split("-")
    compress, _, in_memory = recipe.partition("@")
    archive = export_llm(
        options.model,
        folder,
        activations=activations,
        attention=attention,
        compress=compress,
        weights_in_memory=in_memory or "stored",
        check=False,
        force=True,
        require_tokenizer=False,
    ).archive
    model = tract.nnef().with_tract_transformers().load(archive)
    model.transform("transformers_detect_all")
    contents = read_contents(Path(archive))
    outline = read_outline(contents.graph_text)
    return Form(
        model.into_runnable(),
        lambda past: sum(bytes_read(outline, contents.tensors, {"S": 1, "P": past}).values()),
    )


def measured(forms: Mapping[str, Form], past: int, chunk: int, repeat: int) -> list[dict[str, Any]]:
    """Measure every form at one length of the past, in turn."""
    seconds: dict[str, tuple[list[float], list[float]]] = {form: ([], []) for form in forms}
    for _ in range(repeat):
        for name, form in forms.items():
            state = form.runnable.spawn_state()
            fed = [min(chunk, past - start) for start in range(0, past, chunk)]
            seconds[name][0].append(sum(processor_seconds(state, length) for length in fed))
            seconds[name][1].extend(processor_seconds(state, 1) for _ in range(STEPS))
    return [
        {
            "past": past,
            "form": name,
            "prefill_tokens_per_second": past / median(prefill),
            "decode_milliseconds": 1e3 * median(decode),
            "bytes_per_second": forms[name].reads(past) / median(decode),
        }
        for name, (prefill, decode) in seconds.items()
    ]


def processor_seconds(state: Any, length: int) -> float:
    """Feed some tokens, ids that any vocabulary has, and return the processor's time."""
    ids = np.random.default_rng(length).integers(0, 256, (1, length), dtype=np.int64)
    begin = time.process_time()
    state.run([ids])
    return time.process_time() - begin


def table(rows: list[dict[str, Any]], limit: float) -> str:
    """Return the rows in Markdown, with the gain over the first form of the same length."""
    lines = [
        "| past | activations, attention | prefill, tokens/s | decode, ms a token | reads |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        first = next(each for each in rows if each["past"] == row["past"])
        prefill, decode = row["prefill_tokens_per_second"], row["decode_milliseconds"]
        faster = prefill / first["prefill_tokens_per_second"], first["decode_milliseconds"] / decode
        reads = f"{row['bytes_per_second'] / 1e9:.1f} GB/s, {row['bytes_per_second'] / limit:.0%}"
        lines.append(
            f"| {row['past']} | {row['form'].replace('-', ', ')} | {prefill:.0f} ({faster[0]:.2f} x) "
            f"| {decode:.1f} ({faster[1]:.2f} x) | {reads} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()

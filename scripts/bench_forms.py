#!/usr/bin/env python3
"""Measure the forms of a language model's graph beside each other: activations in f16 or f32, attention as operator or products.

usage: scripts/bench_forms.py [MODEL] [--compress RECIPE] [--past 64,512,2048] [--chunk 512] [--repeat N] [--json]

MODEL is a checkpoint folder or hub id; by default SmolLM2-135M-Instruct of scripts/fetch_test_models.py. Each form is exported
without a check, and all of them are then measured in turn in one process, on one thread, with the cache as the engine's state:
tokens a second while the past is fed in chunks, and milliseconds a token after it. Both are the processor's time, so that other
work on the machine disturbs little; read the ratios to the first row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from t2n_llm import export_llm

FORMS = (("f16", "sdpa"), ("f16", "products"), ("f32", "sdpa"), ("f32", "products"))
STEPS = 8
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
DEFAULT_MODEL = CACHE / "t2n-llm" / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    """Export, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEFAULT_MODEL))
    parser.add_argument("--compress", help="a recipe of t2n-llm export")
    parser.add_argument("--past", default="64,512,2048", help="tokens in the cache, comma-separated")
    parser.add_argument("--chunk", type=int, default=512, help="tokens fed at once")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lengths = [int(length) for length in options.past.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        models = {form: loaded(options, Path(folder) / "-".join(form), *form) for form in FORMS}
        rows = [row for length in lengths for row in measured(models, length, options.chunk, options.repeat)]
    print(json.dumps(rows) if options.json else table(rows))


def loaded(options: argparse.Namespace, folder: Path, activations: str, attention: str) -> Any:
    """Export one form, and return the model that runs it."""
    import tract

    archive = export_llm(
        options.model,
        folder,
        activations=activations,
        attention=attention,
        compress=options.compress,
        check=False,
        require_tokenizer=False,
    ).archive
    model = tract.nnef().with_tract_transformers().load(archive)
    model.transform("transformers_detect_all")
    return model.into_runnable()


def measured(models: dict[tuple[str, str], Any], past: int, chunk: int, repeat: int) -> list[dict[str, Any]]:
    """Measure every form at one length of the past, in turn."""
    seconds: dict[tuple[str, str], tuple[list[float], list[float]]] = {form: ([], []) for form in models}
    for _ in range(repeat):
        for form, model in models.items():
            state = model.spawn_state()
            fed = [min(chunk, past - start) for start in range(0, past, chunk)]
            seconds[form][0].append(sum(processor_seconds(state, length) for length in fed))
            seconds[form][1].extend(processor_seconds(state, 1) for _ in range(STEPS))
    return [
        {
            "past": past,
            "activations": activations,
            "attention": attention,
            "prefill_tokens_per_second": past / median(prefill),
            "decode_milliseconds": 1e3 * median(decode),
        }
        for (activations, attention), (prefill, decode) in seconds.items()
    ]


def processor_seconds(state: Any, length: int) -> float:
    """Feed some tokens, ids that any vocabulary has, and return the processor's time."""
    ids = np.random.default_rng(length).integers(0, 256, (1, length), dtype=np.int64)
    begin = time.process_time()
    state.run([ids])
    return time.process_time() - begin


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown, with the gain over the first form of the same length."""
    lines = ["| past | activations | attention | prefill, tokens/s | decode, ms a token |", "|---|---|---|---|---|"]
    for row in rows:
        first = next(each for each in rows if each["past"] == row["past"])
        prefill, decode = row["prefill_tokens_per_second"], row["decode_milliseconds"]
        faster = prefill / first["prefill_tokens_per_second"], first["decode_milliseconds"] / decode
        lines.append(
            f"| {row['past']} | {row['activations']} | {row['attention']} | {prefill:.0f} ({faster[0]:.2f} x) "
            f"| {decode:.1f} ({faster[1]:.2f} x) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

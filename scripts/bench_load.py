#!/usr/bin/env python3
"""Measure how long an archive takes to its first token: in every form, beside reading its bytes once.

usage: scripts/bench_load.py [--size tiny|1B|3B|8B] [--archive tar,dir,tgz] [--compress none,q4_0] [--repeat N]
                             [--work DIR] [--json]

Makes a checkpoint of random weights in the shape of Llama 3, exports it in each form without a check, and then loads every
archive in a process of its own, in turn:

read       seconds to read the archive's files once, from the page cache.
load       reading and simplifying the graph, with the weights.
optimise   code generation: weights are packed for the kernels.
first      a prompt of 64 tokens, whose last logits are the first token.
peak       largest resident size of the engine's process.

Printed are medians. Everything made is deleted at the end. Disk: the checkpoint, and an archive for each form.
Run it with the project's environment: .venv/bin/python scripts/bench_load.py --size 1B --repeat 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_llama import SHAPES, write_checkpoint

from generic_export.inference_target.tract.engines.wheel import TractWheel
from t2n_llm import export_llm
from t2n_llm.check.runner import STATEFUL_TRANSFORM

PROMPT_TOKENS = 64
_READ_BYTES = 1 << 24


def main() -> None:
    """Export, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1B")
    parser.add_argument("--archive", default="tar,dir,tgz", help="comma-separated")
    parser.add_argument("--compress", default="none,q4_0", help="comma-separated recipes; none is f16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for what is made, by default the temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    forms = [(recipe, form) for recipe in options.compress.split(",") for form in options.archive.split(",")]
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, SHAPES[options.size])
        archives = {form: exported(checkpoint, Path(folder), *form) for form in forms}
        runs = [(form, loaded(archive)) for _ in range(options.repeat) for form, archive in archives.items()]
        sizes = {form: sum(path.stat().st_size for path in files_of(archive)) for form, archive in archives.items()}
    rows = [
        {"weights": "f16" if recipe == "none" else recipe, "archive": archive, "bytes": sizes[recipe, archive]}
        | middle([run for form, run in runs if form == (recipe, archive)])
        for recipe, archive in forms
    ]
    print(json.dumps(rows) if options.json else table(rows))


def exported(checkpoint: Path, folder: Path, recipe: str, archive: str) -> Path:
    """Export one form, and return its archive."""
    compress = None if recipe == "none" else recipe
    output = folder / f"{recipe}-{archive}"
    done = export_llm(str(checkpoint), output, archive=archive, compress=compress, check=False, require_tokenizer=False)
    return Path(done.archive)


def loaded(archive: Path) -> dict[str, float]:
    """Load an archive, and feed a prompt to it."""
    begin = time.perf_counter()
    for path in files_of(archive):
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    read = time.perf_counter() - begin
    with TractWheel().load(archive, transforms=[STATEFUL_TRANSFORM]) as model:
        times = model.load_times()
        (first,) = model.time_turns([[np.zeros((1, PROMPT_TOKENS), np.int64)]])
        return {
            "read": read,
            "load": times.load + times.transform,
            "optimise": times.optimise,
            "first": first,
            "peak": model.peak_rss_bytes(),
        }


def files_of(archive: Path) -> list[Path]:
    """Return the files that an archive consists of."""
    return [archive] if archive.is_file() else sorted(path for path in archive.rglob("*") if path.is_file())


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| weights | archive | size | read | load | optimise | first token | to first token | peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        whole = row["load"] + row["optimise"] + row["first"]
        seconds = " | ".join(
            f"{value:.2f} s" for value in (*(row[name] for name in ("read", "load", "optimise", "first")), whole)
        )
        lines.append(
            f"| {row['weights']} | {row['archive']} | {row['bytes'] / 1e9:.2f} GB | {seconds} | {row['peak'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()

#!/usr/bin/env python3
"""Measure what `--fragments` does to an archive: lines and bytes of graph.nnef, and how long tract takes to load it.

usage: scripts/bench_fragments.py [MODEL] [--layers N] [--repeat N] [--json]

MODEL is a checkpoint folder or hub id. Without one it is a random Llama of N layers (32, as in Llama-3.1-8B), narrow so that
loading is the graph and not the weights. The model is exported without a check, without fragments and with them; both archives
are then loaded in turn, each time in a new process, with the caches made state. Times are medians; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from random_llama import SHAPES, write_checkpoint

from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.read.contents import read_contents
from t2n_llm import export_llm
from t2n_llm.check.runner import STATEFUL_TRANSFORM


@dataclass(frozen=True)
class Row:
    """One form of an archive: what `graph.nnef` holds, and seconds until it is loaded, its caches found, and optimised."""

    form: str
    lines: int
    bytes: int
    load: float
    transform: float
    optimise: float


def main() -> None:
    """Export, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a checkpoint folder or hub id")
    parser.add_argument("--layers", type=int, default=32, help="of the random Llama")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = str(Path(folder) / "checkpoint")
            write_checkpoint(Path(model), replace(SHAPES["tiny"], num_hidden_layers=options.layers))
        archives = {
            form: export_llm(
                model, Path(folder) / form, fragments=form == "fragments", check=False, require_tokenizer=False
            ).archive
            for form in ("flat", "fragments")
        }
        rows = measured(archives, options.repeat)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        f"{'form':<10} {'lines':>6} {'bytes':>9} {'load ms':>8} {'transform ms':>13} {'optimise ms':>12} {'ratio':>6}"
    )
    whole = [row.load + row.transform + row.optimise for row in rows]
    for row, seconds in zip(rows, whole, strict=True):
        times = f"{row.load * 1e3:>8.1f} {row.transform * 1e3:>13.1f} {row.optimise * 1e3:>12.1f}"
        print(f"{row.form:<10} {row.lines:>6} {row.bytes:>9} {times} {seconds / whole[0]:>6.2f}")


def measured(archives: dict[str, Path], repeat: int) -> list[Row]:
    """Load the archives in turn, `repeat` times each."""
    engine = TractWheel()
    times: dict[str, list[tuple[float, float, float]]] = {form: [] for form in archives}
    for _ in range(repeat):
        for form, archive in archives.items():
            with engine.load(archive, transforms=[STATEFUL_TRANSFORM]) as model:
                model.operators()  # optimised by now
                found = model.load_times()
                times[form].append((found.load, found.transform, found.optimise))
    rows = []
    for form, archive in archives.items():
        text = read_contents(archive).graph_text
        middle = [median(step) for step in zip(*times[form], strict=True)]
        rows.append(Row(form, len(text.splitlines()), len(text.encode()), *middle))
    return rows


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()

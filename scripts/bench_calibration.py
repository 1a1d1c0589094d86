#!/usr/bin/env python3
"""Measure what a calibration costs at real sizes: processor time and peak memory, beside the forward passes alone.

usage: scripts/bench_calibration.py [--size tiny|1B|3B|8B] [--layers N] [--algorithms best,...] [--texts N] [--work DIR]

Makes a checkpoint of random weights in the shape of Llama 3 with N of its layers. In a process of its own each, it is walked once
over the calibration's tokens (that is the forward pass), and calibrated by every algorithm (texts of 512 tokens; `sensitivity`
is what q4_0-mixed:best measures before, 32 texts of 128 tokens).

Printed are, for each: processor seconds of a layer, as measured between the first layer and the last; what all layers of that shape
would take; that over two forward passes of all layers; the peak memory over a process that imports the same packages, which is that
of one layer and the hidden states of all texts, whatever the number of layers (but for `sensitivity`, which keeps those of every
layer); and what all layers leave on disk. Everything made is deleted at the end.
Run it with the project's environment: .venv/bin/python scripts/bench_calibration.py --size 8B --layers 4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from random_llama import SHAPES, Shape, write_checkpoint

LENGTH = 512
FORWARD, SENSITIVITY, IMPORTS = "forward", "sensitivity", "imports"


@dataclass(frozen=True)
class Cost:
    """What one process took.

    Attributes:
        layer_seconds: processor time of a layer after the first.
        peak_bytes: largest resident size.
        disk_bytes: written by the calibration.
    """

    layer_seconds: float
    peak_bytes: int
    disk_bytes: int = 0


class _Ticks:
    """Processor seconds at every layer."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, _: object = None) -> None:
        self.seen.append(time.process_time())

    def of_a_layer(self) -> float:
        """Return the mean time between two of them."""
        return (self.seen[-1] - self.seen[0]) / (len(self.seen) - 1)


def measured(folder: Path, what: str, texts: int) -> Cost:
    """Do one thing in this process, and say what it took."""
    import torch

    import t2n_llm.compress.calibrate  # what any of them imports
    import t2n_llm.compress.sensitivity  # noqa: F401
    from generic_export.inference_target.tract.engines.wheel_worker import peak_rss_bytes

    ticks = _Ticks()
    torch.manual_seed(0)
    ids = torch.randint(500, (texts, LENGTH))
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        _WORK.get(what, _calibrate)(folder, ids, what, Path(work), ticks)
        disk = sum(path.stat().st_size for path in Path(work).iterdir())
    return Cost(ticks.of_a_layer() if what != IMPORTS else 0.0, peak_rss_bytes(), disk)


def _calibrate(folder: Path, ids: Any, what: str, work: Path, ticks: _Ticks) -> None:
    from t2n_llm.compress.algorithms import CALIBRATED
    from t2n_llm.compress.calibrate import calibrate

    calibrate(
        folder,
        lambda name: CALIBRATED[what] if name.endswith("_proj.weight") else None,
        ids,
        work_dir=work,
        progress=ticks,
    )


def _forward(folder: Path, ids: Any, what: str, work: Path, ticks: _Ticks) -> None:
    from t2n_llm.compress.walk import first_inputs, layer_runs, open_walkable

    model = open_walkable(folder)
    hidden, calls = first_inputs(model, ids)
    for index, call in enumerate(calls):
        with model.resident(index) as layer:
            hidden = [run() for run in layer_runs(layer, hidden, call)]
        ticks()


def _sensitivity(folder: Path, ids: Any, what: str, work: Path, ticks: _Ticks) -> None:
    from t2n_llm.compress.algorithms import CALIBRATED
    from t2n_llm.compress.sensitivity import TEXTS, Inputs, Quantization, divergences
    from t2n_llm.source.hub import open_source
    from t2n_llm.source.reference import SourceRef

    names = open_source(SourceRef(str(folder)), require_tokenizer=False).checkpoint().tensors
    form = Quantization("q4_0", CALIBRATED["best"].quantizer, Inputs.HESSIAN)
    wanted = {name: form for name in names if name.endswith("_proj.weight")}
    length = LENGTH // 4
    divergences(folder, wanted, ids[:, :length].repeat(-(-TEXTS // len(ids)), 1)[:TEXTS], progress=ticks)


def _nothing(folder: Path, ids: Any, what: str, work: Path, ticks: _Ticks) -> None:
    """Leave it at the imports."""


_WORK: dict[str, Callable[[Path, Any, str, Path, _Ticks], None]] = {
    FORWARD: _forward,
    SENSITIVITY: _sensitivity,
    IMPORTS: _nothing,
}


def _in_process(folder: Path, what: str, texts: int) -> Cost:
    command = [sys.executable, __file__, "--child", what, "--work", str(folder), "--texts", str(texts)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(**json.loads(run.stdout.splitlines()[-1]))


def line(shape: Shape, what: str, cost: Cost, forward: Cost, imports: Cost, measured_layers: int) -> str:
    """Return a row of the table."""
    layers = shape.num_hidden_layers
    ratio = "" if what in (FORWARD, SENSITIVITY) else f"{cost.layer_seconds / (2 * forward.layer_seconds):.2f}"
    disk = cost.disk_bytes * layers / measured_layers / 1e9
    return (
        f"| {shape.title} | {what} | {cost.layer_seconds:.1f} s | {cost.layer_seconds * layers / 60:.0f} min | {ratio} "
        f"| {(cost.peak_bytes - imports.peak_bytes) / 1e9:.2f} GB | {disk:.2f} GB |"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1B")
    parser.add_argument("--layers", type=int, default=4, help="of the checkpoint, two at least")
    parser.add_argument("--algorithms", default="best", help="with commas; sensitivity is one, too")
    parser.add_argument("--texts", type=int, default=32, help="of 512 tokens")
    parser.add_argument("--work", type=Path, help="folder for what is made, by default the temporary one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Make the checkpoint, measure, print."""
    options = _arguments()
    if options.child:
        print(json.dumps(asdict(measured(options.work, options.child, options.texts))))
        return
    shape = SHAPES[options.size]
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, replace(shape, num_hidden_layers=options.layers))
        imports, forward = (_in_process(checkpoint, what, options.texts) for what in (IMPORTS, FORWARD))
        print("| shape | | a layer | all layers | over two forward passes | peak memory | disk |")
        print("|---|---|---|---|---|---|---|")
        print(line(shape, FORWARD, forward, forward, imports, options.layers), flush=True)
        for algorithm in options.algorithms.split(","):
            cost = _in_process(checkpoint, algorithm, options.texts)
            print(line(shape, algorithm, cost, forward, imports, options.layers), flush=True)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    main()

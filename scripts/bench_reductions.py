#!/usr/bin/env python3
"""Measure from which length on a matrix product is faster in parts that are added, and how long the parts are best.

usage: scripts/bench_reductions.py [--channels 1536,2048,...] [--pieces 1024,2048,4096] [--tokens 1,128] [--outputs 2048]
                                   [--dtype f16|f32] [--repeat N]

A linear layer of each number of channels, random weights of --dtype, runs whole and cut into parts of each length, in turn in one
process, on one thread. Prints the median ratio of processor time, above 1 where the parts are faster, and the rule that follows:
`MEASURED` of generic_export/nnef/long_reductions.py holds it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generic_export import TractNNEF
from generic_export.capture import prepare
from generic_export.documents import translate_graph
from generic_export.nnef.half_storage import store_in_half
from generic_export.nnef.long_reductions import LongReductions, split_long_reductions
from generic_export.translate.translate import TranslationOptions
from generic_export.weights.half import CastReport, cast_tensor
from generic_export.write.document import write_document

_LABEL = "weight"
_GAIN = 1.05  # for prompts, from which a length counts as faster in parts
_LEAST_SECONDS = 0.02  # of one measurement


def archive(folder: Path, channels: int, outputs: int, piece: int | None, dtype: str) -> Path:
    """Write a linear layer, in parts of so many channels, or whole."""
    torch.manual_seed(0)
    target = TractNNEF(dynamic_axes={"x": {1: "S"}}, check_io=False)
    module = nn.Linear(channels, outputs, bias=False).eval()
    prepared = prepare(module, (torch.zeros(1, 5, channels),), target, ("x",), ("y",))
    graph, sources = translate_graph(prepared.graph, target, TranslationOptions()), dict(prepared.sources)
    if dtype == "f16":
        graph = store_in_half(graph, [_LABEL])
        sources[_LABEL] = cast_tensor(sources[_LABEL], torch.float16, CastReport())
    if piece is not None:
        graph = split_long_reductions(graph, LongReductions(channels, piece))
    return write_document(folder, graph, sources, compression_level=None).path


def runnable(path: Path) -> Any:
    """Load an archive."""
    import tract

    return tract.nnef().with_tract_transformers().load(path).into_runnable()


def processor_seconds(model: Any, values: np.ndarray) -> float:
    """Return the processor's time of one run."""
    count = 1
    while True:
        begin = time.process_time()
        for _ in range(count):
            model.run([values])
        took = time.process_time() - begin
        if took >= _LEAST_SECONDS:
            return took / count
        count = max(2 * count, int(count * _LEAST_SECONDS / max(took, 1e-6)))


def gains(models: dict[int | None, Any], values: np.ndarray, repeat: int) -> dict[int, float]:
    """Return the median ratio of each length of parts to the whole, in turn."""
    seconds: dict[int | None, list[float]] = {piece: [] for piece in models}
    for _ in range(repeat):
        for piece, model in models.items():
            seconds[piece].append(processor_seconds(model, values))
    return {
        piece: median(whole / part for whole, part in zip(seconds[None], parts, strict=True))
        for piece, parts in seconds.items()
        if piece is not None
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser.add_argument("--channels", type=numbers, default="1536,2048,3072,4096,5632,8192,11008,14336")
    parser.add_argument("--pieces", type=numbers, default="1024,2048,4096")
    parser.add_argument("--tokens", type=numbers, default="1,128")
    parser.add_argument("--outputs", type=int, default=2048)
    parser.add_argument("--dtype", choices=("f16", "f32"), default="f16")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args(arguments)
    generator = np.random.default_rng(0)
    pays: dict[int, list[int]] = {piece: [] for piece in options.pieces}
    tokens = max(options.tokens)
    print(f"| channels | tokens | {' | '.join(f'parts of {piece}' for piece in options.pieces)} |")
    print("|---|---|" + "---|" * len(options.pieces))
    for channels in options.channels:
        pieces = [piece for piece in options.pieces if piece < channels]
        with tempfile.TemporaryDirectory() as folder:
            models = {
                piece: runnable(archive(Path(folder, str(piece)), channels, options.outputs, piece, options.dtype))
                for piece in (None, *pieces)
            }
        for count in options.tokens:
            values = generator.standard_normal((1, count, channels), dtype=np.float32)
            found = gains(models, values, options.repeat)
            cells = (f"{found[piece]:.2f} x" if piece in found else "" for piece in options.pieces)
            print(f"| {channels} | {count} | {' | '.join(cells)} |", flush=True)
            if count == tokens:
                for piece in pieces:
                    pays[piece] += [channels] * (found[piece] >= _GAIN)
    for piece, lengths in pays.items():
        print(f"parts of {piece} pay for {tokens} tokens at: {', '.join(map(str, lengths)) or 'none of these'}")
    return 0


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

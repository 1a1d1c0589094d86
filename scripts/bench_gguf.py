#!/usr/bin/env python3
"""Measure how fast the blocks of GGUF files are decoded on one core: MB of float32 a second, beside the gguf package's.

usage: scripts/bench_gguf.py [--types Q4_K,Q6_K] [--values MILLIONS] [--repeat N] [--json]

Each type is decoded from the same random blocks, ours and gguf-py in turn, in pieces of the size that an export streams, both
from memory. Printed: the best of the repeats; the budget is 300 MB/s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from quant.prequantized.gguf_blocks import LAYOUTS, decode_blocks
from quant.prequantized.tensors import PIECE_VALUES

BUDGET = 300


def random_rows(kind: str, values: int) -> np.ndarray:
    """Return random blocks, as one row a piece: finite scales, whatever levels."""
    layout = LAYOUTS[kind]
    random = np.random.default_rng(0)
    rows = random.integers(
        0, 256, (max(1, values // PIECE_VALUES), PIECE_VALUES // layout.values, layout.size), np.uint8
    )
    for place in (layout.scale, layout.minimum):
        if place is not None:
            rows[:, :, place + 1] &= 0x3B  # exponents far from those of inf and nan
    return rows.reshape(len(rows), -1)


def speed(decode: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> float:
    """Return MB of float32 a processor second, a row of blocks at a time."""
    start, total = time.thread_time(), 0
    for row in rows:
        total += decode(row[None]).nbytes
    return total / (time.thread_time() - start) / 1e6


def measure(kind: str, values: int, repeat: int) -> dict[str, Any]:
    """Return the best speeds of a type, ours and gguf-py's."""
    rows, code = random_rows(kind, values), GGMLQuantizationType[kind]
    few = rows[: max(1, len(rows) // 8)]  # gguf-py takes its time
    with np.errstate(all="ignore"):
        assert decode_blocks(kind, rows[:1]).tobytes() == dequantize(rows[:1], code).tobytes()  # compiles, too
    ours = [speed(lambda row: decode_blocks(kind, row), rows) for _ in range(repeat)]
    with np.errstate(all="ignore"):
        theirs = [speed(lambda row: dequantize(row, code), few) for _ in range(repeat)]
    return {"type": kind, "mb_per_s": round(max(ours)), "gguf_py_mb_per_s": round(max(theirs))}


def main() -> int:
    """Measure, print a table or JSON; 1 when a type misses the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(LAYOUTS))
    parser.add_argument("--values", type=int, default=64, help="million values of each type")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [measure(kind, options.values * 10**6, options.repeat) for kind in options.types.split(",")]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("| type | MB/s of float32 | gguf-py |\n|---|---|---|")
        for each in found:
            print(f"| {each['type']} | {each['mb_per_s']} | {each['gguf_py_mb_per_s']} |")
    return int(any(each["mb_per_s"] < BUDGET for each in found))


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    raise SystemExit(main())

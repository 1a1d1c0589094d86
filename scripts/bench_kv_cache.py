#!/usr/bin/env python3
"""Measure what a quantised cache costs: KL to the f16 cache and tokens a second after 512, 4,096 and 16,384 tokens.

usage: scripts/bench_kv_cache.py [--model DIR] [--text FILE] [--depths N,...] [--scored N] [--windows N] [--positions N]
                                 [--chunk N] [--threads N] [--work DIR] [--json FILE]

model      by default SmolLM2-135M-Instruct as scripts/fetch_test_models.py makes it.
caches     f16 and f32 (--stateful with --cache-dtype), int8 and int4 (--kv-cache); weights in f16. Exports are made in --work
           unless they are there.
positions  of the copy that is exported: beyond those that the model was trained for only speed is measured.
chunk      tokens of the past that are fed at a time.

At each depth the cache is filled with held-out text, and the next tokens of it are fed one by one. KL is the mean over these, over
windows spread over the text, of KL(f16 cache || row). Contenders take turns; a speed is the median of the windows. The bytes of a
position are those of all layers, as the operator keeps them (`tract_transformers_quantized_dyn_kv_cache`, tract 0.23.9).
Run it with the project's environment: .venv/bin/python scripts/bench_kv_cache.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from fetch_test_models import FetchError, default_output, fetch

from generic_export.errors import T2NError
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel
from t2n_llm import export_llm
from t2n_llm.compress.text import read_text
from t2n_llm.export.archive_lookup import locate_archive
from t2n_llm.inspect.quality import windows_of_text
from t2n_llm.source.hub import load_tokenizer

PROJECT = Path(__file__).resolve().parent.parent
HELD_OUT = PROJECT / "examples" / "models" / "tiny-llama-real" / "eval.txt"
REFERENCE = "f16"
CACHES: Mapping[str, dict[str, Any]] = {
    REFERENCE: {"stateful": True, "cache_dtype": "f16"},
    "f32": {"stateful": True, "cache_dtype": "f32"},
    "int8": {"kv_cache": "int8"},
    "int4": {"kv_cache": "int4"},
}


@dataclass
class Row:
    """One cache at one depth.

    Attributes:
        cache, depth: which.
        divergences: KL to the f16 cache at each scored token, nats.
        same: scored tokens after which both prefer the same next one.
        seconds: of a decoded token, the median of each window.
        filling: seconds that the past took, by window.
    """

    cache: str
    depth: int
    divergences: list[float] = field(default_factory=list)
    same: int = 0
    seconds: list[float] = field(default_factory=list)
    filling: list[float] = field(default_factory=list)

    def asdict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        count = len(self.divergences)
        return {
            "cache": self.cache,
            "depth": self.depth,
            "tokens_per_second": 1 / statistics.median(self.seconds),
            "prefill_tokens_per_second": self.depth / statistics.median(self.filling),
            "mean_kl": sum(self.divergences) / count if count else None,
            "same_top1": self.same / count if count else None,
            "scored": len(self.divergences),
        }


@dataclass(frozen=True)
class Plan:
    """What is fed.

    Attributes:
        chunk: tokens of the past in one turn.
        scored: tokens after it, one a turn.
    """

    chunk: int
    scored: int

    def turns(self, window: Sequence[int]) -> list[list[np.ndarray]]:
        """Return the turns of a window, the past first."""
        past, steps = window[: -self.scored], window[-self.scored :]
        pieces = [past[start : start + self.chunk] for start in range(0, len(past), self.chunk)]
        return [[np.array([piece], np.int64)] for piece in (*pieces, *([token] for token in steps))]


# --- measuring --------------------------------------------------------------------------------


def with_positions(model: Path, work: Path, positions: int) -> Path:
    """Return a copy of a model's folder whose config has so many positions, made unless it is there."""
    copy = work / f"{model.name}-{positions}"
    if not copy.is_dir():
        shutil.copytree(model, copy)
        config = copy / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": positions}))
    return copy


def archive_of(model: Path, cache: str, work: Path) -> Path:
    """Return an export with a cache, made unless it is there."""
    folder = work / f"{model.name}-cache-{cache}"
    if not (folder / "export.json").is_file():
        export_llm(str(model), folder, dtype="f16", check=False, archive="dir", **CACHES[cache])
    return locate_archive(folder).path


def answers(model: WheelModel, turns: Sequence[list[np.ndarray]], scored: int) -> torch.Tensor:
    """Return the logits after each scored token, float32 [scored, vocab]."""
    session = model.spawn_state()
    rows = [session.run(turn)[0][0, -1] for turn in turns]
    session.close()
    return torch.from_numpy(np.stack(rows[-scored:]).astype(np.float32))


def time_window(models: Mapping[str, WheelModel], window: Sequence[int], plan: Plan, rows: Mapping[str, Row]) -> None:
    """Add the times of one window to the rows: the caches take turns."""
    for name, model in models.items():
        seconds = model.time_turns(plan.turns(window))
        rows[name].seconds.append(statistics.median(seconds[-plan.scored :]))
        rows[name].filling.append(sum(seconds[: -plan.scored]))


def compare_window(
    models: Mapping[str, WheelModel], window: Sequence[int], plan: Plan, rows: Mapping[str, Row]
) -> None:
    """Add what one window tells of quality to the rows."""
    turns = plan.turns(window)
    expected = answers(models[REFERENCE], turns, plan.scored).log_softmax(-1)
    for name, model in models.items():
        actual = expected if name == REFERENCE else answers(model, turns, plan.scored).log_softmax(-1)
        rows[name].divergences += (expected.exp() * (expected - actual)).sum(-1).tolist()
        rows[name].same += int((expected.argmax(-1) == actual.argmax(-1)).sum())


def measured(options: argparse.Namespace, work: Path) -> Iterator[Row]:
    """Yield the rows, depth by depth."""
    source = options.model if options.model is not None else fetch(default_output())
    depths = [int(each) for each in options.depths.split(",")]
    plan = Plan(options.chunk, options.scored)
    trained = json.loads((source / "config.json").read_text()).get("max_position_embeddings") or sys.maxsize
    model = with_positions(source, work, max(options.positions, max(depths) + options.scored))
    tokenizer, text = load_tokenizer(model), read_text(options.text, "text")
    with ExitStack() as stack:
        engine = TractWheel(timeout_seconds=7200, threads=options.threads)
        models = {name: stack.enter_context(engine.load(archive_of(model, name, work))) for name in CACHES}
        for depth in depths:
            rows = {name: Row(name, depth) for name in CACHES}
            length = depth + options.scored
            for window in windows_of_text(tokenizer, text, options.windows, length):
                time_window(models, window, plan, rows)
                if length <= trained:
                    compare_window(models, window, plan, rows)
            yield from rows.values()


# --- telling ----------------------------------------------------------------------------------


def line(row: Row, first: Row) -> str:
    """Return a row of the table; `first` is the f16 cache at its depth."""
    found, speed = row.asdict(), row.asdict()["tokens_per_second"]
    ratio = speed / first.asdict()["tokens_per_second"]
    quality = f"{found['mean_kl']:.5f} | {100 * found['same_top1']:.1f} %" if row.divergences else "- | -"
    return (
        f"| {row.depth} | {row.cache} | {speed:.1f} | {ratio:.2f} | {found['prefill_tokens_per_second']:.0f} "
        f"| {quality} | {found['scored']} |"
    )


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--depths", default="512,4096,16384")
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--positions", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t2n-kv-")))
        work.mkdir(parents=True, exist_ok=True)
        print("| past | cache | tokens/s | x f16 | prefill, tokens/s | mean KL | same token | scored |", flush=True)
        print("|---|---|---|---|---|---|---|---|", flush=True)
        rows: list[Row] = []
        try:
            for row in measured(options, work):
                rows.append(row)
                first = next(each for each in rows if each.depth == row.depth)
                print(line(row, first), flush=True)
        except (FetchError, T2NError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if options.json is not None:
            options.json.write_text(json.dumps([row.asdict() | asdict(row) for row in rows], indent=2))
    return 0


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

#!/usr/bin/env python3
"""Measure exports beside llama.cpp, keep the ratios, and fail when one falls.

usage: scripts/bench_rivals.py [--model DIR] [--against RIVAL ...] [--exports f16,q4_0] [--prefill N,...] [--depth N,...]
                               [--decode N] [--repeat N] [--threads N,...] [--work DIR] [--history FILE.jsonl]

model      by default SmolLM2-135M-Instruct as scripts/fetch_test_models.py makes it.
against    by default llama.cpp, from npm's node-llama-cpp (docs/how-to/inspect-and-benchmark.md says where it is looked for).
exports    f16 and q4_0 by default; f16-for-prompts has f32 in memory. Made in --work unless they are there; each is measured
           against files of the same element types.
history    gets one line: this machine, and every ratio of our speed to a rival's. Ratios that are more than a tenth below the
           median of the last runs on the same kind of machine are listed, and the exit code is 1; nothing is judged by
           fewer than three.

Prints Markdown: speeds, ratios of our speed to theirs (above 1 is faster), goals.
Contenders take turns, so ratios hold beside other work; speeds need an idle machine.
Run it with the project's environment: .venv/bin/python scripts/bench_rivals.py --history out/rivals.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fetch_test_models import FetchError, default_output, fetch

from generic_export.errors import OptionError, T2NError
from t2n_llm import export_llm
from t2n_llm.bench.benchmark import bench_archives
from t2n_llm.bench.comparison import SpeedComparison
from t2n_llm.cli.comparison import Grid
from t2n_llm.export.archive_lookup import locate_archive

EXPORTS: Mapping[str, dict[str, Any]] = {
    "f16": {},
    "q4_0": {"compress": "q4_0"},
    "f16-for-prompts": {"weights_in_memory": "f32", "cache_dtype": "f32"},
}
LAST_RUNS = 14  # that the median is of
LEAST_RUNS = 3
FALL = 0.9  # of the median

Ratios = Mapping[str, float]


@dataclass(frozen=True)
class Goal:
    """One figure that is aimed at.

    Attributes:
        export, kind, tokens: what is measured.
        least: of our speed over llama.cpp's, on one thread.
    """

    export: str
    kind: str
    tokens: int
    least: float


GOALS = (
    *(Goal("f16", "decode", depth, 1 / 1.3) for depth in (64, 512, 2048)),
    Goal("f16", "decode", 8192, 1 / 2),
    *(Goal(export, "prefill", tokens, 1.25) for export in ("f16", "f16-for-prompts") for tokens in (64, 512)),
    *(Goal("q4_0", "decode", depth, 1 / 1.9) for depth in (64, 512, 2048)),
)
GROWTH_GOAL = 0.35e-6  # seconds a past position and layer, f16


# --- measuring --------------------------------------------------------------------------------


def exported(model: Path, name: str, work: Path) -> Path:
    """Return an export of a model, made unless it is there."""
    folder = work / f"{model.name}-{name}"
    if not (folder / "export.json").is_file():
        export_llm(str(model), folder, check=False, require_tokenizer=False, **EXPORTS[name])
    return folder


def measured(export: Path, model: Path, options: argparse.Namespace) -> SpeedComparison:
    """Return an export measured beside its rivals."""
    from generic_export.inference_target.tract.engines.wheel import TractWheel

    located = [locate_archive(export)]
    grid = Grid.parse(options.prefill, options.depth, options.threads)
    plan = grid.plan(located, options.decode, options.repeat, 1, against=True)
    tell = lambda message: print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)  # noqa: E731
    engine = TractWheel(timeout_seconds=3600)
    return bench_archives(located, engine, plan, tell, against=options.against, checkpoint=str(model))


def ratios_of(export: str, comparison: SpeedComparison) -> dict[str, float]:
    """Return our speed over each rival's, by what is measured."""
    found = {}
    for run in comparison.runs:
        if run is comparison.with_threads(run.threads)[0]:
            continue
        for point in run.points:
            name = f"{export} {point.kind} {point.tokens} / {run.name}, threads {run.threads}"
            found[name] = comparison.advantage(run, point.kind, point.tokens)
    return found


def growth(comparison: SpeedComparison, index: int, layers: int) -> float | None:
    """Return the seconds that each past position adds to a step, by layer; None of fewer than two depths."""
    run = comparison.with_threads(comparison.plan.threads[0])[index]
    steps = [(point.tokens, 1 / point.speed.median) for point in run.points if point.kind == "decode"]
    if len({tokens for tokens, _ in steps}) < 2:
        return None
    return statistics.linear_regression(*zip(*steps, strict=True)).slope / layers


# --- telling ----------------------------------------------------------------------------------


def tables(export: str, comparison: SpeedComparison) -> Iterator[str]:
    """Yield a table in Markdown for each number of threads."""
    plan = comparison.plan
    for threads in plan.threads:
        runs = comparison.with_threads(threads)
        yield f"\n### {export}, {threads} thread{'s' * (threads > 1)}\n"
        ratios = [f"{runs[0].name} / {run.name}" for run in runs[1:]]
        yield f"| tokens a second | {' | '.join([*(run.name for run in runs), *ratios])} |"
        yield "|---" * (2 * len(runs)) + "|"
        for point in runs[0].points:
            label = f"prefill {point.tokens}" if point.kind == "prefill" else f"decode after {point.tokens}"
            cells = [f"{run.speed(point.kind, point.tokens).median:,.1f}" for run in runs]
            cells += [f"{comparison.advantage(run, point.kind, point.tokens):.2f} x" for run in runs[1:]]
            yield f"| {label} | {' | '.join(cells)} |"
        nothing = " |" * (len(runs) - 1)
        yield f"| load, s | {' | '.join(f'{run.load_seconds:.2f}' for run in runs)} |{nothing}"
        yield f"| peak memory, MB | {' | '.join(f'{run.peak_rss_bytes / 1e6:,.0f}' for run in runs)} |{nothing}"
    yield "\n" + "; ".join(f"{run.name}: {run.version}" for run in comparison.with_threads(plan.threads[0]))


def goals_table(ratios: Ratios, rival: str, growths: Mapping[str, float]) -> Iterator[str]:
    """Yield what was aimed at and what was reached, on one thread."""
    yield f"\n### Goals, beside {rival}\n"
    yield "| what | goal | measured | reached |"
    yield "|---|---|---|---|"
    for goal in GOALS:
        ratio = ratios.get(f"{goal.export} {goal.kind} {goal.tokens} / {rival}, threads 1")
        if ratio is not None:
            aimed, found = (f"{each:.2f} x its speed" for each in (goal.least, ratio))
            yield f"| {goal.export} {goal.kind} {goal.tokens} | {aimed} | {found} | {_said(ratio >= goal.least)} |"
    for name, seconds in growths.items():
        reached = _said(seconds <= GROWTH_GOAL) if name == "f16" else ""
        yield f"| growth a position and layer, {name} | {GROWTH_GOAL * 1e6:.2f} us | {seconds * 1e6:.2f} us | {reached} |"


def _said(reached: bool) -> str:
    return "yes" if reached else "no"


# --- history ----------------------------------------------------------------------------------


def this_machine() -> str:
    """Return what kind of machine this is: figures of different kinds are not compared."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} processors"


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file, oldest first; a line that is none (a job that was killed) is left out."""
    if not path.is_file():
        return []
    runs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            run = json.loads(line)
        except ValueError:
            continue
        if isinstance(run, dict) and isinstance(run.get("ratios"), dict):
            runs.append(run)
    return runs


def fallen(ratios: Ratios, history: Iterable[Mapping[str, Any]], machine: str) -> list[str]:
    """Return a sentence for each ratio that is a tenth below the median of the last runs on such a machine."""
    runs = [run for run in history if run.get("machine") == machine][-LAST_RUNS:]
    sentences = []
    for name, ratio in ratios.items():
        before = [run["ratios"][name] for run in runs if name in run["ratios"]]
        if len(before) >= LEAST_RUNS and ratio < FALL * statistics.median(before):
            sentences.append(
                f"{name}: {ratio:.3f}, median of the last {len(before)} runs {statistics.median(before):.3f}"
            )
    return sentences


def keep(path: Path, ratios: Ratios, machine: str) -> None:
    """Add a run to a file of runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"when": when, "machine": machine, "ratios": dict(ratios)}) + "\n")


# --- the whole --------------------------------------------------------------------------------


def run(options: argparse.Namespace, work: Path) -> int:
    """Measure, print, keep and judge; returns the exit code."""
    model = options.model or fetch(default_output(), tell=lambda message: print(message, file=sys.stderr))
    layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    ratios: dict[str, float] = {}
    growths: dict[str, float] = {}
    print(f"{model.name}, {this_machine()}", flush=True)
    for name in options.exports:
        comparison = measured(exported(model, name, work), model, options)
        ratios |= ratios_of(name, comparison)
        for index, each in enumerate(comparison.with_threads(comparison.plan.threads[0])):
            slope = growth(comparison, index, layers)
            if slope is not None:
                growths[name if index == 0 else f"{name} in {each.name}"] = slope
        print("\n".join(tables(name, comparison)), flush=True)
    print("\n".join(goals_table(ratios, options.against[0], growths)), flush=True)
    return judge(ratios, options.history) if options.history is not None else 0


def judge(ratios: Ratios, path: Path) -> int:
    """Keep the ratios, and return 1 when one has fallen."""
    machine = this_machine()
    sentences = fallen(ratios, read_history(path), machine)
    keep(path, ratios, machine)
    for sentence in sentences:
        print(f"error: slower than before: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint")
    parser.add_argument("--against", action="append", metavar="RIVAL", help="as t2n-llm bench has them")
    parser.add_argument("--exports", default="f16,q4_0", metavar="NAME,...", help="which exports")
    parser.add_argument("--prefill", default="64,512,2048", metavar="N,...", help="lengths of prompts")
    parser.add_argument("--depth", default="64,512,2048,8192", metavar="N,...", help="cached tokens")
    parser.add_argument("--decode", type=int, default=16, metavar="N", help="steps at each depth, a repeat")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="measurements of each")
    parser.add_argument("--threads", default="1", metavar="N,...", help="1,all for both")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps the exports")
    parser.add_argument("--history", type=Path, metavar="FILE.jsonl", help="keeps the ratios")
    options = parser.parse_args(arguments)
    options.against = options.against or ["llama.cpp"]
    options.exports = options.exports.split(",")
    unknown = [name for name in options.exports if name not in EXPORTS]
    if unknown:
        parser.error(f"unknown export {unknown[0]!r}: one of {', '.join(EXPORTS)}.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    options = parsed(arguments)
    try:
        if options.work is not None:
            options.work.mkdir(parents=True, exist_ok=True)
            return run(options, options.work)
        with tempfile.TemporaryDirectory(prefix="t2n-rivals-") as work:
            return run(options, Path(work))
    except (T2NError, FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

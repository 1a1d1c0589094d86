#!/usr/bin/env python3
"""Draw what size buys: the KL divergence of `q4_0-mixed` exports at several sizes, measured through tract.

usage: scripts/mixed_curve.py [--model DIR|FILE.gguf] [--text FILE] [--calibration FILE] [--algorithms A,B,...] [--growths 5,10,...]
                              [--no-permute] [--work DIR] [--json FILE.jsonl] [--output FILE.svg]

model      by default SmolLM2-135M-Instruct as scripts/fetch_test_models.py makes it, its channels permuted
           (scripts/measured_model.py says why).
growths    sizes, in percent on top of everything in 4 bits (embeddings and head, too), which is the first point of a curve.
           `q4_0`, which leaves embeddings and head in f16, is drawn as a cross, and one point is a tenth larger than it.
--json     gets a line for each export as soon as it is measured; those that are in it are not made again.

Run it with the project's environment: .venv/bin/python scripts/mixed_curve.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measured_model import PROJECT, NoModelError, add_model_arguments, measured_model, work_folder
from quantization_table import WINDOW

_TOKENS = 8 * (WINDOW - 1)
_INCHES = (7.0, 4.2)


@dataclass(frozen=True)
class Point:
    """One export.

    Attributes:
        algorithm: chooses the values.
        recipe: `q4_0`, `q4_0+embeddings` or `q4_0-mixed`.
        target: the size that `q4_0-mixed` fills; "" of the others.
        bytes: of all weights.
        kl: mean KL(f32 || export), nats.
        top1: share of positions with the same most likely token.
        perplexity: on the scored tokens.
    """

    algorithm: str
    recipe: str
    target: str
    bytes: int
    kl: float
    top1: float
    perplexity: float

    @property
    def key(self) -> tuple[str, str, str]:
        """What was asked for."""
        return self.algorithm, self.recipe, self.target


def wanted(
    algorithms: Sequence[str], growths: Sequence[str], points: Sequence[Point]
) -> Iterator[tuple[str, str, str]]:
    """Yield algorithm, recipe and target of every export; `points` has those that were yielded before."""
    for algorithm in algorithms:
        yield algorithm, "q4_0+embeddings", ""
        yield algorithm, "q4_0", ""
        plain = next(point for point in points if point.key == (algorithm, "q4_0", ""))
        yield algorithm, "q4_0-mixed", str(plain.bytes * 11 // 10)
        for growth in growths:
            yield algorithm, "q4_0-mixed", f"+{growth}%"


def measured(model: Path, options: argparse.Namespace, key: tuple[str, str, str], work: Path) -> Point:
    """Export, and measure what came of it."""
    from t2n_llm.export.pipeline import export_llm
    from t2n_llm.inspect.quantize_report import quantize_report

    algorithm, recipe, target = key
    output = work / "export"
    export_llm(
        str(model),
        output,
        dtype="f16",
        compress=f"{recipe}:{algorithm}",
        target_size=target or None,
        calibration=options.calibration,
        check=False,
        archive="dir",
        force=True,
        num_logits_to_keep=0,
    )
    report = quantize_report(output, str(model), text=options.text, tokens=_TOKENS, window=WINDOW)
    shutil.rmtree(output)
    found = report.quality
    return Point(
        algorithm, recipe, target, report.bytes, found.mean_kl_divergence, found.same_top1_share, found.perplexity
    )


def read_points(path: Path | None) -> list[Point]:
    """Return the points of a file; none where there is none."""
    if path is None or not path.is_file():
        return []
    return [Point(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def draw(points: Sequence[Point], title: str, output: Path) -> None:
    """Write a picture: a curve for each algorithm, from everything in 4 bits upwards."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for algorithm in dict.fromkeys(point.algorithm for point in points):
        own = [point for point in points if point.algorithm == algorithm]
        curve = sorted((point.bytes / 1e6, point.kl) for point in own if point.recipe != "q4_0")
        (line,) = axes.plot(*zip(*curve, strict=True), marker="o", label=f"q4_0-mixed:{algorithm}")
        for point in own:
            if point.recipe == "q4_0":
                axes.plot(point.bytes / 1e6, point.kl, "x", color=line.get_color(), label=f"q4_0:{algorithm}")
    axes.set(xlabel="weights, MB", ylabel="mean KL from f32, nats", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--algorithms", default="search,best")
    parser.add_argument("--growths", default="2.5,5,10,20,40", help="percent, with commas")
    parser.add_argument("--json", type=Path, help="also write the points to this file")
    parser.add_argument("--output", type=Path, default=PROJECT / "docs" / "measurements" / "mixed.svg")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and draw everything; returns the exit status."""
    options = _arguments(argv)
    try:
        _run(options)
    except NoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    points = read_points(options.json)
    known = {point.key for point in points}
    print("| recipe | size | KL | same token | perplexity |\n|---|---|---|---|---|")
    with work_folder(options.work) as work:
        model = measured_model(options.model, work, permute=not options.no_permute)
        for key in wanted(options.algorithms.split(","), options.growths.split(","), points):
            if key not in known:
                points.append(measured(model, options, key, work))
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(points[-1])) + "\n")
            point = next(each for each in points if each.key == key)
            print(
                f"| `{point.recipe}:{point.algorithm}` {point.target} | {point.bytes / 1e6:.1f} MB | {point.kl:.4f} "
                f"| {100 * point.top1:.1f} % | {point.perplexity:.2f} |",
                flush=True,
            )
    draw(points, options.model.name, options.output)
    print(options.output)


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

#!/usr/bin/env python3
"""Export every causal LM architecture of the installed transformers twice, and compare the bytes of the archives.

usage: scripts/reproducible.py [--only gemma3_text,llama] [--limit N] [--shard I/N]
                               [--dtype f16] [--seeds 1,2] [--results FILE.jsonl]

Each tiny random checkpoint is exported in two processes that differ in PYTHONHASHSEED, in the temporary folder and in the time.
Prints a line for each architecture whose archives differ, with the first differing line of graph.nnef. What cannot be built or
exported is counted and left to the zoo. Exit code 1: archives differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SAME, DIFFERENT, KNOWN, SKIPPED = "same", "different", "known to differ", "skipped"
# Their code in transformers iterates over a set that is written with braces, whose order is that of the process.
_UNORDERED = frozenset({"dory"})
_WORKER = "--export-what-stdin-names"


@dataclass(frozen=True)
class Comparison:
    """What two exports of one architecture have in common.

    Attributes:
        architecture: a model type of transformers.
        outcome: `same`, `different`, `known to differ` or `skipped`.
        files: how many files the archive has.
        message: what differs, or why nothing was compared.
    """

    architecture: str
    outcome: str
    files: int = 0
    message: str = ""


# --- one process ----------------------------------------------------------------------------------


def serve(dtype: str) -> None:
    """Export each checkpoint that a line of stdin names, and answer with the folder of the archive, or with an error."""
    from t2n_llm import export_llm

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a model prints
    with tempfile.TemporaryDirectory(prefix="t2n-reproducible-") as work:
        for number, line in enumerate(sys.stdin):
            try:
                folder = Path(work, str(number))
                result = export_llm(
                    json.loads(line), folder, dtype=dtype, check=False, archive="dir", require_tokenizer=False
                )
                answer = {"archive": str(result.archive)}
            except Exception as error:  # whatever a model's own code raises
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


class Exporter:
    """A process with its own hash seed."""

    def __init__(self, seed: str, dtype: str) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, __file__, _WORKER, "--dtype", dtype]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def begin(self, checkpoint: Path) -> None:
        """Let it export a checkpoint."""
        stream: IO[str] = self._process.stdin  # type: ignore[assignment]
        stream.write(json.dumps(str(checkpoint)) + "\n")
        stream.flush()

    def archive(self) -> Path | str:
        """Wait for the export; return the folder, or why there is none."""
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            return "the process ended"
        answer = json.loads(line)
        return Path(answer["archive"]) if "archive" in answer else str(answer["error"])

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


# --- comparing --------------------------------------------------------------------------------


def compared(architecture: str, exporters: Sequence[Exporter]) -> Comparison:
    """Export one architecture in all processes, and compare."""
    from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model

    with tempfile.TemporaryDirectory(prefix="t2n-reproducible-") as folder:
        checkpoint = Path(folder, "model")
        try:
            save_tiny_model(build_tiny_model(architecture), checkpoint)
        except Exception as error:  # whatever a model's own code raises
            return Comparison(architecture, SKIPPED, message=f"{type(error).__name__}: {error}"[:200])
        for exporter in exporters:
            exporter.begin(checkpoint)
        archives = [exporter.archive() for exporter in exporters]
        refusal = next((each for each in archives if isinstance(each, str)), None)
        if refusal is not None:
            return Comparison(architecture, SKIPPED, message=refusal[:200])
        return compare(architecture, *(each for each in archives if isinstance(each, Path)))


def compare(architecture: str, one: Path, other: Path) -> Comparison:
    """Compare two archives byte for byte."""
    first, second = digests(one), digests(other)
    names = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
    if not names:
        return Comparison(architecture, SAME, len(first))
    line = first_difference(one, other) if "graph.nnef" in names else ""
    outcome = KNOWN if architecture in _UNORDERED else DIFFERENT
    return Comparison(architecture, outcome, len(first), f"{', '.join(names[:3])}{line}")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def first_difference(one: Path, other: Path) -> str:
    """Return the first line of graph.nnef that differs, in both forms."""
    lines = [(folder / "graph.nnef").read_text(encoding="utf-8").splitlines() for folder in (one, other)]
    for left, right in zip(*lines, strict=False):
        if left != right:
            return f": {left.strip()[:160]} | {right.strip()[:160]}"
    return ": one graph is longer"


# --- the whole --------------------------------------------------------------------------------


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the architectures to export."""
    from t2n_llm.tasks.names import TEXT_GENERATION
    from t2n_llm.zoo.run import RunOptions, parse_shard, plan_cells
    from t2n_llm.zoo.tasks import architectures

    only = tuple(options.only.split(",")) if options.only else ()
    plan = RunOptions(only=only, limit=options.limit, shard=parse_shard(options.shard))
    cells = plan_cells(plan, {TEXT_GENERATION: architectures()})
    return [cell.architecture for cell in cells]


def run(options: argparse.Namespace) -> Iterator[Comparison]:
    """Yield the comparisons as they come."""
    exporters = [Exporter(seed, options.dtype) for seed in options.seeds.split(",")[:2]]
    try:
        for architecture in chosen(options):
            yield compared(architecture, exporters)
    finally:
        for exporter in exporters:
            exporter.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="model types or shell patterns, with commas")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many, the best known first")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--dtype", default="f16", help="element type of the weights")
    parser.add_argument("--seeds", default="1,2", metavar="A,B", help="the two hash seeds")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines, as they come")
    parser.add_argument(_WORKER, action="store_true", dest="worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        serve(options.dtype)
        return 0
    counts = dict.fromkeys((SAME, DIFFERENT, KNOWN, SKIPPED), 0)
    for comparison in run(options):
        counts[comparison.outcome] += 1
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(comparison)) + "\n")
        if comparison.outcome == DIFFERENT:
            print(f"{comparison.architecture}: {comparison.message}", flush=True)
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.items()))
    return 1 if counts[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measure what an export costs, in time against `cp` of the same checkpoint and in memory.

usage: scripts/bench_export.py --size tiny|1B|3B|8B [--dtype f16|f32] [--archive tar|dir|tgz[,...]] [--compress SCHEME]
                               [--work DIR] [--repeat N] [--json]

Makes a checkpoint of random bf16 weights in the shape of Llama 3 (sharded as on the hub), then, `--repeat` times in
turn, copies it with `cp` and exports it without check in a process of its own, to each form. Printed are medians:

cp      wall time of `cp`; flushing the copy to the disk is timed apart, and not part of the ratio.
weights from the first byte read to the archive renamed into place: cast, SHA-256 of every tensor, flush to the disk.
graph   capture and translation, no weight in the process.
export  wall time of the whole process, from the start of Python to its end. Also CPU time, and the split by stage.
        With --compress, each export is also made without, and the two weights phases are compared.
memory  peak resident memory of that process, less the peak of one that imports the same packages and does nothing.

The budgets are weights <= 1.5 x cp (folder and tar), compressed weights <= 3 x plain ones, graph <= 15 s, memory <= 0.8 GiB.
Both `cp` and the export read a checkpoint that was just written, so as much of it as fits is in the page cache for both; before
each of them, everything written earlier is flushed, so that neither waits for the other's data. Disk space: twice the checkpoint
(f32: three times), in DIR, which is made when missing, by default the temporary folder; everything made there is deleted at the
end, also after Ctrl-C. With --json, one object a line for each form. Linux only, since peaks are read from /proc.
Run it with the project's environment: .venv/bin/python scripts/bench_export.py --size 1B --archive dir,tar --repeat 3
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NoReturn

from random_llama import SHAPES, Shape, bytes_of, tensors_of, write_checkpoint

PROJECT = Path(__file__).resolve().parent.parent

BUDGET_RATIO = 1.5  # weights phase over cp
BUDGET_COMPRESSED = 3.0  # weights phase over the same without compression
BUDGET_GRAPH_SECONDS = 15.0
BUDGET_MIB = 0.8 * 1024

ARCHIVES = ("tar", "dir", "tgz")
_GRAPH_STAGES = ("Capturing", "Translating")
_WEIGHT_STAGES = ("Writing", "Flushing")

_MIB = 1 << 20


class BenchError(Exception):
    """The benchmark cannot run; the message says why, on one line."""


# --- in the child process ---------------------------------------------------------------------


@dataclass(frozen=True)
class TimedStage:
    """One stage of an export: how long it took, processor time in all threads, and the peak memory until its end."""

    title: str
    seconds: float
    cpu: float
    peak_mib: float


class StageClock:
    """A `Reporter` that times the stages."""

    def __init__(self, started: float) -> None:
        self.stages: list[TimedStage] = []
        self._title = "Starting, importing"
        self._since, self._cpu_since = started, 0.0

    def stage(self, title: str) -> None:
        """End the stage before and begin another."""
        now, cpu = time.time(), time.process_time()
        self.stages.append(TimedStage(self._title, now - self._since, cpu - self._cpu_since, peak_rss_mib()))
        self._title = title.split(" /")[0]  # without the path of the checkpoint
        self._since, self._cpu_since = now, cpu

    def steps(self, done: int, total: int) -> None:
        """Ignore the layers of a capture."""

    def progress(self, progress: Any) -> None:
        """Take the end of the writing for the beginning of a stage of its own."""
        if progress.done_entries == progress.total_entries and self._title.startswith("Writing"):
            self.stage("Flushing to the disk")

    def warn(self, message: str) -> None:
        """Pass it on."""
        print(f"warning: {message}", file=sys.stderr)


def peak_rss_mib() -> float:
    """Return this process's peak resident memory in MiB."""
    from generic_export.inference_target.tract.engines.wheel_worker import peak_rss_bytes

    return peak_rss_bytes() / 2**20


def _child(order: Mapping[str, Any]) -> None:
    """Do what the parent ordered, and leave the figures in the file it named."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from t2n_llm.export.pipeline import export_llm

    clock = StageClock(order["started"])
    if order["checkpoint"] is not None:
        export_llm(
            order["checkpoint"],
            order["target"],
            dtype=order["dtype"],
            archive=order["archive"],
            compress=order["compress"],
            check=False,
            require_tokenizer=False,
            reporter=clock,
        )
    clock.stage("end")
    times = os.times()
    figures = {
        "stages": [asdict(stage) for stage in clock.stages],
        "user": times.user,
        "system": times.system,
        "peak_mib": peak_rss_mib(),
    }
    Path(order["figures"]).write_text(json.dumps(figures), encoding="utf-8")


def _run_as_child(order: Mapping[str, Any]) -> int:
    try:
        _child(order)
    except KeyboardInterrupt:  # the parent got it as well, and speaks
        return 1
    return 0


# --- measuring --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """One `cp`, in seconds; `sync` is the flush that follows."""

    seconds: float
    sync: float


@dataclass(frozen=True)
class ChildRun:
    """One child process, in seconds of wall and processor time."""

    seconds: float
    user: float
    system: float
    peak_mib: float
    stages: tuple[TimedStage, ...]


@dataclass(frozen=True)
class Outcome:
    """Everything measured for one model."""

    size: str
    dtype: str
    archive: str
    compress: str | None
    checkpoint_bytes: int
    baseline_mib: float
    copies: tuple[Copy, ...]
    exports: tuple[ChildRun, ...]
    plain: tuple[ChildRun, ...] = ()  # the same without compression, each just before

    @cached_property
    def figures(self) -> dict[str, float]:
        """Medians of all repeats, and what follows from them; times in seconds, `_cpu` of processor time in all threads.

        `sync` is flushing the copy, `weights` from the first byte of weights read to the archive in place, `graph` capture and
        translation, `plain` the weights phase without compression (0 where that was not measured), `extra_mib` the peak memory
        of the export over the baseline.
        """
        cp, weights = median(copy.seconds for copy in self.copies), _phase(self.exports, _WEIGHT_STAGES)
        return {
            "cp_seconds": cp,
            "sync_seconds": median(copy.sync for copy in self.copies),
            "export_seconds": median(run.seconds for run in self.exports),
            "graph_seconds": _phase(self.exports, _GRAPH_STAGES),
            "weights_seconds": weights,
            "weights_cpu": _phase(self.exports, _WEIGHT_STAGES, "cpu"),
            "plain_seconds": _phase(self.plain, _WEIGHT_STAGES),
            "plain_cpu": _phase(self.plain, _WEIGHT_STAGES, "cpu"),
            "weights_ratio": weights / cp,
            "extra_mib": median(run.peak_mib for run in self.exports) - self.baseline_mib,
        }

    @property
    def within_budget(self) -> dict[str, bool]:
        """Whether each budget holds."""
        return {
            "graph_within_budget": self.figures["graph_seconds"] <= BUDGET_GRAPH_SECONDS,
            "weights_within_budget": self.figures["weights_ratio"] <= BUDGET_RATIO,
            "memory_within_budget": self.figures["extra_mib"] <= BUDGET_MIB,
        }

    def stages(self) -> list[TimedStage]:
        """Return the medians of each stage."""
        runs = zip(*(run.stages for run in self.exports), strict=True)
        return [
            TimedStage(
                same[0].title, *(median(getattr(s, name) for s in same) for name in ("seconds", "cpu", "peak_mib"))
            )
            for same in runs
        ]

    def asdict(self) -> dict[str, Any]:
        """Return the figures as plain data for JSON, every repeat included."""
        return asdict(self) | self.figures | self.within_budget


def _phase(runs: Sequence[ChildRun], titles: tuple[str, ...], what: str = "seconds") -> float:
    """Return the median of what the stages whose titles begin so took together; 0 without runs."""
    sums = [sum(getattr(s, what) for s in run.stages if s.title.startswith(titles)) for run in runs]
    return median(sums) if sums else 0.0


def measure(
    size: str, dtype: str, archives: Sequence[str], work: Path, repeat: int, compress: str | None = None
) -> list[Outcome]:
    """Make the checkpoint and measure.

    Args:
        size: key of `SHAPES`.
        dtype: `f16` or `f32`.
        archives: `tar`, `dir` or `tgz`, each to be measured.
        work: an empty folder; what is made in it is left to the caller to delete.
        repeat: how many times to copy and to export, in turn.
        compress: weight compression, as `export_llm` takes it; the plain export is then measured as well.

    Raises:
        BenchError: no space, or the export failed.
    """
    shape = SHAPES[size]
    _check_space(work, shape, dtype)
    _tell(f"writing a checkpoint of the shape of {shape.title}")
    checkpoint = work / "checkpoint"
    checkpoint_bytes = write_checkpoint(checkpoint, shape)
    order = {"checkpoint": str(checkpoint), "target": str(work / "export"), "dtype": dtype, "compress": compress}
    baseline = run_child(work, order | {"checkpoint": None})
    copies: dict[str, list[Copy]] = {archive: [] for archive in archives}
    exports: dict[str, list[ChildRun]] = {archive: [] for archive in archives}
    plain: dict[str, list[ChildRun]] = {archive: [] for archive in archives}
    for turn in range(1, repeat + 1):
        for archive in archives:
            _tell(f"{turn} of {repeat}: cp")
            copies[archive].append(time_copy(checkpoint, work / "copy"))
            if compress is not None:
                _tell(f"{turn} of {repeat}: export to {archive} without compression")
                plain[archive].append(run_child(work, order | {"archive": archive, "compress": None}))
                shutil.rmtree(work / "export")
            _tell(f"{turn} of {repeat}: export to {archive}")
            exports[archive].append(run_child(work, order | {"archive": archive}))
            shutil.rmtree(work / "export")
    return [
        Outcome(
            size=size,
            dtype=dtype,
            archive=archive,
            compress=compress,
            checkpoint_bytes=checkpoint_bytes,
            baseline_mib=baseline.peak_mib,
            copies=tuple(copies[archive]),
            exports=tuple(exports[archive]),
            plain=tuple(plain[archive]),
        )
        for archive in archives
    ]


def _check_space(work: Path, shape: Shape, dtype: str) -> None:
    weights = sum(map(bytes_of, tensors_of(shape).values()))
    needed = weights * (3 if dtype == "f32" else 2) + 64 * _MIB
    free = shutil.disk_usage(work).free
    if free < needed:
        raise BenchError(
            f"{work}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; name another --work."
        )


def time_copy(checkpoint: Path, target: Path) -> Copy:
    """Time `cp` of a folder, then flushing the copy, and delete the copy."""
    os.sync()
    begin = time.monotonic()
    # --reflink=never: a file system that shares blocks would copy nothing.
    subprocess.run(["cp", "--reflink=never", "-R", str(checkpoint), str(target)], check=True)
    copied = time.monotonic()
    os.sync()
    flushed = time.monotonic()
    shutil.rmtree(target)
    return Copy(copied - begin, flushed - copied)


def run_child(work: Path, order: Mapping[str, Any]) -> ChildRun:
    """Run this file in a process of its own and return what it measured.

    Raises:
        BenchError: the process failed; its own message is on stderr.
    """
    figures = work / "figures.json"
    figures.unlink(missing_ok=True)
    os.sync()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
    begin, started = time.monotonic(), time.time()
    order = {**order, "started": started, "figures": str(figures)}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(order)]
    done = subprocess.run(command, env=environment, check=False)
    seconds = time.monotonic() - begin
    if done.returncode or not figures.is_file():
        raise BenchError(f"the measured process ended with code {done.returncode}; its message is above.")
    record = json.loads(figures.read_text(encoding="utf-8"))
    stages = [TimedStage(**stage) for stage in record["stages"]]
    rest = max(0.0, seconds - sum(stage.seconds for stage in stages))
    cpu = record["user"] + record["system"] - sum(stage.cpu for stage in stages)
    stages.append(TimedStage("Ending Python", rest, max(0.0, cpu), record["peak_mib"]))
    return ChildRun(seconds, record["user"], record["system"], record["peak_mib"], tuple(stages))


# --- printing ---------------------------------------------------------------------------------


def table(outcome: Outcome) -> str:
    """Return the figures for people."""
    runs, of, holds = outcome.exports, outcome.figures, outcome.within_budget
    kind = f"{outcome.dtype}{f' {outcome.compress}' if outcome.compress else ''}"
    user, system = median(run.user for run in runs), median(run.system for run in runs)
    weights = f"{of['weights_seconds']:.1f} s ({of['weights_cpu']:.1f} s of processor), {of['weights_ratio']:.2f} x cp"
    peak = of["extra_mib"] + outcome.baseline_mib
    rows = [
        ("checkpoint", f"{outcome.checkpoint_bytes / 1e9:.2f} GB of bf16"),
        ("cp", f"{of['cp_seconds']:.1f} s, and {of['sync_seconds']:.1f} s until it is on the disk"),
        ("export", f"{of['export_seconds']:.1f} s ({user:.1f} s user, {system:.1f} s system)"),
        ("weights", weights),
        (f"weights <= {BUDGET_RATIO} x cp", _yes(holds["weights_within_budget"])),
        *_plain_rows(outcome),
        ("capture and translate", f"{of['graph_seconds']:.1f} s"),
        (f"<= {BUDGET_GRAPH_SECONDS:.0f} s", _yes(holds["graph_within_budget"])),
        ("peak RSS over baseline", f"{of['extra_mib']:.0f} MiB ({peak:.0f} - {outcome.baseline_mib:.0f})"),
        (f"<= {BUDGET_MIB / 1024:.1f} GiB", _yes(holds["memory_within_budget"])),
    ]
    title = f"{SHAPES[outcome.size].title}, {kind}, {outcome.archive}, medians of {len(runs)}"
    lines = [
        title,
        *(f"  {name:<24} {value}" for name, value in rows),
        "",
        f"  {'stage':<28} {'s':>7} {'s of cpu':>9}  peak MiB so far",
    ]
    lines += [
        f"  {stage.title[:28]:<28} {stage.seconds:7.1f} {stage.cpu:9.1f}  {stage.peak_mib:8.0f}"
        for stage in outcome.stages()
    ]
    return "\n".join(lines)


def _plain_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return what compression costs over the same export without it."""
    if not outcome.plain:
        return []
    of = outcome.figures
    wall, cpu = of["weights_seconds"] / of["plain_seconds"], of["weights_cpu"] / of["plain_cpu"]
    return [
        ("weights, not compressed", f"{of['plain_seconds']:.1f} s ({of['plain_cpu']:.1f} s of processor)"),
        ("compressed over that", f"{wall:.2f} x ({cpu:.2f} x of processor)"),
        (f"<= {BUDGET_COMPRESSED:.0f} x", _yes(wall <= BUDGET_COMPRESSED)),
    ]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    del signum, frame
    raise KeyboardInterrupt


def _archives(text: str) -> tuple[str, ...]:
    archives = tuple(text.split(","))
    if not set(archives) <= set(ARCHIVES):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(ARCHIVES)}, with commas")
    return archives


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--size", choices=SHAPES, help="shape of the model")
    parser.add_argument("--dtype", choices=("f16", "f32"), default="f16", help="of the archive (default f16)")
    parser.add_argument("--archive", type=_archives, default=("tar",), help="forms, with commas (default tar)")
    parser.add_argument("--compress", metavar="SCHEME", help="weight compression (default none)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the files go (default: the temporary folder)")
    parser.add_argument("--repeat", type=int, metavar="N", default=1, help="how often (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


@contextmanager
def _work_folder(parent: Path | None) -> Iterator[Path]:
    """Yield an empty folder in `parent`, which is made when missing; at the end remove what was made."""
    folders = [parent, *parent.parents] if parent is not None else []
    made = [folder for folder in folders if not folder.exists()]
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="t2n-bench-", dir=parent) as work:
            yield Path(work)
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.child is not None:
        return _run_as_child(options.child)
    if options.size is None or options.repeat < 1:
        parser.error("give a --size, and a --repeat of at least 1")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _work_folder(options.work) as work:
            outcomes = measure(options.size, options.dtype, options.archive, work, options.repeat, options.compress)
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind.", file=sys.stderr)
        return 1
    print("\n".join(json.dumps(o.asdict()) for o in outcomes) if options.json else "\n\n".join(map(table, outcomes)))
    return 0


if __name__ == "__main__":
    from table_source import print_source

    print_source()
    sys.exit(main())

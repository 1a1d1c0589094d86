#!/usr/bin/env python3
"""Measure what an export costs, in time against `cp` of the same checkpoint and in memory.

usage: scripts/bench_export.py --size tiny|1B|3B|8B [--dtype f16|f32] [--archive tar|tgz|dir] [--work DIR]
                               [--compress NAME] [--repeat N] [--json]

Makes a checkpoint of random bf16 weights in the shape of Llama 3 (sharded as on the hub), then, `--repeat` times in
turn, copies it with `cp` and exports it without check in a process of its own. Printed are medians:

cp      wall time of `cp`; flushing the copy to the disk is timed apart, and not part of the ratio.
export  wall time of the whole process, from the start of Python to its end; the export flushes its archive to the disk,
        and that is part of it. Also CPU time, and the split by stage.
memory  peak resident memory of that process, less the peak of one that imports the same packages and does nothing.

The budget is 2.0 x cp + 15 s, and 1.0 GiB. Both `cp` and the export read a checkpoint that was just written, so as much of it
as fits is in the page cache for both; before each of them, everything written earlier is flushed, so that neither
waits for the other's data. Disk space: twice the checkpoint (f32: three times), in DIR, by default the temporary folder;
everything made there is deleted at the end, also after Ctrl-C. Linux only, since peaks are read from /proc.
Run it with the project's environment: .venv/bin/python scripts/bench_export.py --size 1B --repeat 3
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NoReturn

import numpy as np

PROJECT = Path(__file__).resolve().parent.parent

BUDGET_RATIO = 2.0
BUDGET_SECONDS = 15.0
BUDGET_MIB = 1024.0

SHARD_BYTES = 5_000_000_000  # what save_pretrained and the hub call 5GB
_CHUNK_BYTES = 1 << 24
_MIB = 1 << 20


class BenchError(Exception):
    """The benchmark cannot run; the message says why, on one line."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model."""

    title: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    rope_factor: float


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape("tiny Llama", 64, 2, 4, 2, 16, 128, 512, True, 8.0),
    "1B": Shape("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, True, 32.0),
    "3B": Shape("Llama-3.2-3B", 3072, 28, 24, 8, 128, 8192, 128256, True, 32.0),
    "8B": Shape("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256, False, 8.0),
}


# --- the checkpoint ---------------------------------------------------------------------------


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the content of `config.json`, in the words the hub's own files use."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, in the order of the hub's files."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, shape.intermediate),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for index in range(shape.layers):
        tensors |= {f"model.layers.{index}.{name}.weight": sizes for name, sizes in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    return tensors if shape.tied else tensors | {"lm_head.weight": (shape.vocab, hidden)}


def shards_of(tensors: Mapping[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    """Distribute the tensors over files of at most `limit` bytes, as far as single tensors allow."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, sizes in tensors.items():
        size = _bytes_of(sizes)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_checkpoint(folder: Path, shape: Shape, *, shard_bytes: int = SHARD_BYTES, seed: int = 0) -> int:
    """Write config and random bf16 weights, a chunk at a time.

    Args:
        folder: made by this function.
        shape: the model.
        shard_bytes: most bytes of tensors in one file.
        seed: of the weights.

    Returns:
        Bytes of the whole folder.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2), encoding="utf-8")
    tensors = tensors_of(shape)
    shards = shards_of(tensors, shard_bytes)
    random = np.random.Generator(np.random.SFC64(seed))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        sharded = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = sharded if len(shards) > 1 else "model.safetensors"
        _write_shard(folder / file, {name: tensors[name] for name in names}, random)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(map(_bytes_of, tensors.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def _write_shard(path: Path, tensors: Mapping[str, tuple[int, ...]], random: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, sizes in tensors.items():
        end = position + _bytes_of(sizes)
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for sizes in tensors.values():
            for chunk in random_bf16(_bytes_of(sizes), random):
                file.write(chunk)


def random_bf16(nbytes: int, random: np.random.Generator) -> Iterator[memoryview]:
    """Yield `nbytes` of random bf16 values with magnitudes from 2^-7 to 2^-5, in chunks."""
    for start in range(0, nbytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, nbytes - start)
        bits = random.integers(0, 1 << 64, size=(size + 7) // 8, dtype=np.uint64)
        bits &= np.uint64(0x80FF_80FF_80FF_80FF)  # random sign, mantissa and lowest bit of the exponent
        bits |= np.uint64(0x3C00_3C00_3C00_3C00)
        yield memoryview(bits).cast("B")[:size]


def _bytes_of(sizes: Sequence[int]) -> int:
    total = 2
    for size in sizes:
        total *= size
    return total


# --- in the child process ---------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One stage of an export: how long it took, and the process's peak memory until its end."""

    title: str
    seconds: float
    peak_mib: float


class StageClock:
    """A `Reporter` that times the stages."""

    def __init__(self, started: float) -> None:
        self.stages: list[Stage] = []
        self._title = "Starting, importing"
        self._since = started

    def stage(self, title: str) -> None:
        """End the stage before and begin another."""
        now = time.time()
        self.stages.append(Stage(self._title, now - self._since, peak_rss_mib()))
        self._title, self._since = title.split(" /")[0], now  # without the path of the checkpoint

    def progress(self, label: str, done: int, total: int) -> None:
        """Take the end of the writing for the beginning of a stage of its own."""
        del label
        if done >= total:
            self.stage("Flushing to the disk")

    def warn(self, message: str) -> None:
        """Pass it on."""
        print(f"warning: {message}", file=sys.stderr)


def peak_rss_mib() -> float:
    """Return this process's peak resident memory in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise BenchError("the kernel does not tell peak memory (no VmHWM in /proc/self/status).")


def _child(order: Mapping[str, Any]) -> None:
    """Do what the parent ordered, and leave the figures in the file it named."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from t2n_llm.export import export_llm

    clock = StageClock(order["started"])
    if order["checkpoint"] is not None:
        export_llm(
            order["checkpoint"],
            order["target"],
            dtype=order["dtype"],
            archive=order["archive"],
            compress=order.get("compress"),
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
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Outcome:
    """Everything measured for one model."""

    size: str
    dtype: str
    archive: str
    checkpoint_bytes: int
    baseline_mib: float
    copies: tuple[Copy, ...]
    exports: tuple[ChildRun, ...]

    @property
    def cp_seconds(self) -> float:
        """Median wall time of `cp`."""
        return median(copy.seconds for copy in self.copies)

    @property
    def sync_seconds(self) -> float:
        """Median time of flushing the copy."""
        return median(copy.sync for copy in self.copies)

    @property
    def export_seconds(self) -> float:
        """Median wall time of the export process."""
        return median(run.seconds for run in self.exports)

    @property
    def allowed_seconds(self) -> float:
        """What the budget allows for the measured `cp`."""
        return BUDGET_RATIO * self.cp_seconds + BUDGET_SECONDS

    @property
    def extra_mib(self) -> float:
        """Median peak memory of the export over the baseline."""
        return median(run.peak_mib for run in self.exports) - self.baseline_mib

    def stages(self) -> list[Stage]:
        """Return the medians of each stage."""
        runs = zip(*(run.stages for run in self.exports), strict=True)
        return [
            Stage(same[0].title, median(s.seconds for s in same), median(s.peak_mib for s in same)) for same in runs
        ]

    def asdict(self) -> dict[str, Any]:
        """Return the figures as plain data for JSON, every repeat included."""
        return asdict(self) | {
            "cp_seconds": self.cp_seconds,
            "sync_seconds": self.sync_seconds,
            "export_seconds": self.export_seconds,
            "ratio": self.export_seconds / self.cp_seconds,
            "allowed_seconds": self.allowed_seconds,
            "time_within_budget": self.export_seconds <= self.allowed_seconds,
            "extra_mib": self.extra_mib,
            "memory_within_budget": self.extra_mib <= BUDGET_MIB,
        }


def measure(size: str, dtype: str, archive: str, work: Path, repeat: int, compress: str | None = None) -> Outcome:
    """Make the checkpoint and measure.

    Args:
        size: key of `SHAPES`.
        dtype: `f16` or `f32`.
        archive: `tar`, `tgz` or `dir`.
        work: an empty folder; what is made in it is left to the caller to delete.
        repeat: how many times to copy and to export, in turn.
        compress: a recipe by name, or None.

    Raises:
        BenchError: no space, or the export failed.
    """
    shape = SHAPES[size]
    _check_space(work, shape, dtype)
    _tell(f"writing a checkpoint of the shape of {shape.title}")
    checkpoint = work / "checkpoint"
    checkpoint_bytes = write_checkpoint(checkpoint, shape)
    order = {"checkpoint": str(checkpoint), "target": str(work / "export"), "dtype": dtype, "archive": archive}
    order |= {"compress": compress} if compress else {}
    baseline = run_child(work, order | {"checkpoint": None})
    copies, exports = [], []
    for turn in range(1, repeat + 1):
        _tell(f"{turn} of {repeat}: cp")
        copies.append(time_copy(checkpoint, work / "copy"))
        _tell(f"{turn} of {repeat}: export")
        exports.append(run_child(work, order))
        shutil.rmtree(work / "export")
    return Outcome(size, dtype, archive, checkpoint_bytes, baseline.peak_mib, tuple(copies), tuple(exports))


def _check_space(work: Path, shape: Shape, dtype: str) -> None:
    weights = sum(map(_bytes_of, tensors_of(shape).values()))
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
    stages = [Stage(**stage) for stage in record["stages"]]
    rest = max(0.0, seconds - sum(stage.seconds for stage in stages))
    stages.append(Stage("Ending Python", rest, record["peak_mib"]))
    return ChildRun(seconds, record["user"], record["system"], record["peak_mib"], tuple(stages))


# --- printing ---------------------------------------------------------------------------------


def table(outcome: Outcome) -> str:
    """Return the figures for people."""
    runs, seconds, cp = outcome.exports, outcome.export_seconds, outcome.cp_seconds
    user, system = median(run.user for run in runs), median(run.system for run in runs)
    peak = outcome.extra_mib + outcome.baseline_mib
    rows = [
        ("checkpoint", f"{outcome.checkpoint_bytes / 1e9:.2f} GB of bf16"),
        ("cp", f"{cp:.1f} s, and {outcome.sync_seconds:.1f} s until it is on the disk"),
        ("export", f"{seconds:.1f} s ({user:.1f} s user, {system:.1f} s system)"),
        ("export / cp", f"{seconds / cp:.1f}"),
        (
            f"time <= {BUDGET_RATIO} x cp + {BUDGET_SECONDS:.0f} s",
            f"{_yes(seconds <= outcome.allowed_seconds)} ({seconds:.1f} of {outcome.allowed_seconds:.1f} s)",
        ),
        ("peak RSS over baseline", f"{outcome.extra_mib:.0f} MiB ({peak:.0f} - {outcome.baseline_mib:.0f})"),
        ("<= 1.0 GiB", _yes(outcome.extra_mib <= BUDGET_MIB)),
    ]
    title = f"{SHAPES[outcome.size].title}, {outcome.dtype}, {outcome.archive}, medians of {len(runs)}"
    lines = [
        title,
        *(f"  {name:<24} {value}" for name, value in rows),
        "",
        f"  {'stage':<28} {'s':>7}  peak MiB so far",
    ]
    lines += [f"  {stage.title[:28]:<28} {stage.seconds:7.1f}  {stage.peak_mib:8.0f}" for stage in outcome.stages()]
    return "\n".join(lines)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    del signum, frame
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--size", choices=SHAPES, help="shape of the model")
    parser.add_argument("--dtype", choices=("f16", "f32"), default="f16", help="of the archive (default f16)")
    parser.add_argument("--archive", choices=("tar", "tgz", "dir"), default="tar", help="form (default tar)")
    parser.add_argument("--compress", metavar="NAME", help="recipe, such as q4_0 (default: none)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the files go (default: the temporary folder)")
    parser.add_argument("--repeat", type=int, metavar="N", default=1, help="how often (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


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
        with tempfile.TemporaryDirectory(prefix="t2n-bench-", dir=options.work) as work:
            outcome = measure(
                options.size, options.dtype, options.archive, Path(work), options.repeat, options.compress
            )
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind.", file=sys.stderr)
        return 1
    print(json.dumps(outcome.asdict()) if options.json else table(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Speed and memory of archives side by side: prefill and decode in tokens a second, load, code generation, peak memory.

In: archives and a `BenchPlan`. Out: `BenchReport`. `pp512` and `tg128` are what llama.cpp's llama-bench calls them: 512
tokens at once, and 128 one by one after an empty (or `depth` tokens deep) cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import EngineLoadError, OptionError
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.engine import Array
from generic_export.inference_target.tract.engines.wheel import TractWheel, WheelModel, WheelSession
from generic_export.read.contents import read_contents
from generic_export.read.outline import read_outline
from t2n_llm.check.runner import empty_input, grows
from t2n_llm.export.located import LocatedArchive, distinct_names
from t2n_llm.graph.prefill import Chunks, split_prompt
from t2n_llm.inspect.inspection import stateful_transforms

PREFILL_TOKENS = 512
DECODE_TOKENS = 128
_TOLD = 3  # inputs of an archive that is refused
_CLI_SIZES = (PREFILL_TOKENS, DECODE_TOKENS, 0)  # llm-bench of tract 0.23.9 measures these, whatever it is told

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        prefill: tokens of the prompt, fed at once.
        decode: tokens fed one by one.
        depth: tokens already in the cache when the decoding starts.
        repeats: how often each is measured.
        warmup: how often each is run before.

    Raises:
        OptionError: a number is too small.
    """

    prefill: int = PREFILL_TOKENS
    decode: int = DECODE_TOKENS
    depth: int = 0
    repeats: int = 5
    warmup: int = 1

    def __post_init__(self) -> None:
        least = {"prefill": 1, "decode": 1, "depth": 0, "repeats": 1, "warmup": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise OptionError(f"{name} is {getattr(self, name)}.", f"Use {minimum} or more.")


@dataclass(frozen=True)
class Samples:
    """One figure measured several times.

    Attributes:
        values: in the order measured.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the smallest and the largest value, as a share of the median."""
        return (max(self.values) - min(self.values)) / 2 / self.median if self.median else 0.0

    def asdict(self) -> dict[str, Any]:
        """Return the figure as plain data."""
        return {"median": self.median, "spread": self.spread, "values": self.values}


@dataclass(frozen=True)
class ArchiveFigures:
    """What was measured of one archive.

    Attributes:
        name: what it is called beside the others.
        path: where it is.
        archive_bytes: its size on the disk.
        bits_per_weight: of its tensors, as stored.
        prefill, decode: tokens a second.
        load, optimise: seconds to read and simplify it, and to generate code; once a process, so a cold load is in it.
        peak_rss_bytes: largest resident size of the engine's process.
    """

    name: str
    path: Path
    archive_bytes: int
    bits_per_weight: float
    prefill: Samples
    decode: Samples
    load: Samples
    optimise: Samples
    peak_rss_bytes: int

    def asdict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "name": self.name,
            "archive": str(self.path),
            "archive_bytes": self.archive_bytes,
            "bits_per_weight": self.bits_per_weight,
            "prefill_tokens_per_second": self.prefill.asdict(),
            "decode_tokens_per_second": self.decode.asdict(),
            "load_seconds": self.load.asdict(),
            "optimise_seconds": self.optimise.asdict(),
            "peak_rss_bytes": self.peak_rss_bytes,
        }


@dataclass(frozen=True)
class BenchReport:
    """Several archives measured alike; the first is what the others are compared with."""

    engine: str
    engine_version: str
    device: str
    plan: BenchPlan
    archives: tuple[ArchiveFigures, ...]

    def ratios(self) -> list[dict[str, float]]:
        """Return each archive's figures divided by the first's: above 1 is faster, or larger."""
        first = self.archives[0]
        return [
            {
                "prefill": _ratio(figures.prefill.median, first.prefill.median),
                "decode": _ratio(figures.decode.median, first.decode.median),
                "peak_rss": _ratio(figures.peak_rss_bytes, first.peak_rss_bytes),
                "archive_bytes": _ratio(figures.archive_bytes, first.archive_bytes),
            }
            for figures in self.archives
        ]

    def asdict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "engine": self.engine,
            "engine_version": self.engine_version,
            "device": self.device,
            "plan": asdict(self.plan),
            "archives": [
                figures.asdict() | {"ratio_to_first": ratio}
                for figures, ratio in zip(self.archives, self.ratios(), strict=True)
            ],
        }


def _ratio(value: float, first: float) -> float:
    return value / first if first else 0.0


def bench_archives(
    archives: Sequence[LocatedArchive], engine: TractWheel | TractCli, plan: BenchPlan, progress: Progress
) -> BenchReport:
    """Measure archives one after another, each in engine processes of its own.

    Args:
        archives: at least one.
        engine: its device and its time limit count.
        plan: what to measure.
        progress: told what begins.

    Raises:
        ArchiveError: one is damaged. All are looked at before the first is measured.
        OptionError: the plan does not fit the engine or a model's positions.
        EngineError: the engine is missing, has no such device, refuses an archive, or fails.
    """
    if isinstance(engine, TractCli) and (plan.prefill, plan.decode, plan.depth) != _CLI_SIZES:
        raise OptionError(
            f"tract's llm-bench measures {PREFILL_TOKENS} and {DECODE_TOKENS} tokens from an empty cache, nothing else.",
            "Leave the sizes out, or use --engine wheel.",
        )
    described = [_describe(archive, plan) for archive in archives]
    figures = []
    for archive, description, name in zip(archives, described, distinct_names(archives), strict=True):
        progress(f"Measuring {name}")
        figures.append(_measure(archive, description, name, engine, plan))
    return BenchReport(engine.name, engine.version, engine.device, plan, tuple(figures))


def _measure(
    archive: LocatedArchive, described: ArchiveDescription, name: str, engine: TractWheel | TractCli, plan: BenchPlan
) -> ArchiveFigures:
    if isinstance(engine, TractCli):
        return _measure_cli(archive, described, name, engine, plan)
    return _measure_wheel(archive, described, name, engine, plan)


@dataclass(frozen=True)
class ArchiveDescription:
    """What is known of an archive before it runs.

    Attributes:
        stored_bytes: its size on the disk.
        bits_per_weight: of its tensors, as stored.
        transforms: what the engine needs to keep the caches itself.
    """

    stored_bytes: int
    bits_per_weight: float
    transforms: tuple[str, ...]


def describe_archive(archive: LocatedArchive) -> ArchiveDescription:
    """Read what is known of an archive before it runs.

    Raises:
        ArchiveError: it is damaged.
    """
    contents = read_contents(archive.path)
    outline = read_outline(contents.graph_text)
    values = sum(tensor.elements for tensor in contents.tensors)
    bits = sum(tensor.data_bytes for tensor in contents.tensors) * 8 / values if values else 0.0
    return ArchiveDescription(contents.stored_bytes, bits, tuple(stateful_transforms(outline)))


def _describe(archive: LocatedArchive, plan: BenchPlan) -> ArchiveDescription:
    described = describe_archive(archive)
    longest = max(plan.prefill, plan.depth + plan.decode)
    if archive.max_positions is not None and longest > archive.max_positions:
        raise OptionError(
            f"{archive.name} has {archive.max_positions} positions, the bench needs {longest}.", "Ask for fewer tokens."
        )
    return described


# --- the wheel ----------------------------------------------------------------------------------


def _measure_wheel(
    archive: LocatedArchive, described: ArchiveDescription, name: str, engine: TractWheel, plan: BenchPlan
) -> ArchiveFigures:
    with engine.load(archive.path, transforms=described.transforms) as model:
        check_interface(archive, model)
        ids = _token_ids(archive, max(plan.prefill, plan.depth + plan.decode))
        prefill = [_prefill_speed(model, ids, plan) for _ in range(plan.warmup + plan.repeats)][plan.warmup :]
        decode = [_decode_speed(model, ids, plan, archive.prefill) for _ in range(plan.warmup + plan.repeats)][
            plan.warmup :
        ]
        times = model.load_times()
        return ArchiveFigures(
            name=name,
            path=archive.path,
            archive_bytes=described.stored_bytes,
            bits_per_weight=described.bits_per_weight,
            prefill=Samples(tuple(prefill)),
            decode=Samples(tuple(decode)),
            load=Samples((times.load + times.transform,)),
            optimise=Samples((times.optimise,)),
            peak_rss_bytes=model.peak_rss_bytes(),
        )


def check_interface(archive: LocatedArchive, model: WheelModel) -> None:
    """Refuse an archive that wants more than token ids, and states that are fed back.

    Raises:
        EngineLoadError: its inputs are others.
    """
    (first, *others) = model.inputs or (None,)
    fed_back = len(others) == len(model.outputs) - 1 and not any(grows(fact) for fact in others)
    if first is None or not fed_back or first.datum_type != "i64" or len(first.shape) != 2:
        inputs = "; ".join(map(str, model.inputs[:_TOLD])) or "none"
        more = f" and {len(model.inputs) - _TOLD} more" if len(model.inputs) > _TOLD else ""
        raise EngineLoadError(
            f"{archive.path}: not a language model that takes token ids only; its inputs are {inputs}{more}.",
            "bench measures exports of t2n-llm and archives of their form (docs/how-to/inspect-and-benchmark.md).",
        )


def fresh_session(model: WheelModel) -> WheelSession:
    """Return a session without a past: token ids go in, states that are not the engine's own are fed back in its process."""
    session = model.spawn_state()
    states = [empty_input(fact) for fact in model.inputs[1:]]
    if states:
        session.feed_back(states)
    return session


def timed_turns(model: WheelModel, turns: Sequence[Sequence[Array]]) -> list[float]:
    """Return the seconds of turns on a state of their own."""
    session = fresh_session(model)
    try:
        return session.time_turns(turns)
    finally:
        session.close()


def _token_ids(archive: LocatedArchive, count: int) -> Array:
    """Return ids [1, count], random where the vocabulary is known: experts of a mixture are chosen by token."""
    size = archive.vocab_size or 1
    return np.random.default_rng(0).integers(0, size, (1, count), dtype=np.int64)


def _prefill_speed(model: WheelModel, ids: Array, plan: BenchPlan) -> float:
    (seconds,) = timed_turns(model, [[ids[:, : plan.prefill]]])
    return plan.prefill / seconds


def _decode_speed(model: WheelModel, ids: Array, plan: BenchPlan, chunks: Chunks) -> float:
    past = [[np.array([piece], np.int64)] for piece in split_prompt(ids[0, : plan.depth].tolist(), chunks)]
    steps = [[ids[:, at : at + 1]] for at in range(plan.depth, plan.depth + plan.decode)]
    return plan.decode / sum(timed_turns(model, [*past, *steps])[len(past) :])


# --- the command --------------------------------------------------------------------------------


def _measure_cli(
    archive: LocatedArchive, described: ArchiveDescription, name: str, engine: TractCli, plan: BenchPlan
) -> ArchiveFigures:
    runs = [engine.llm_bench(archive.path, warmup_runs=plan.warmup) for _ in range(plan.repeats)]
    return ArchiveFigures(
        name=name,
        path=archive.path,
        archive_bytes=described.stored_bytes,
        bits_per_weight=described.bits_per_weight,
        prefill=Samples(tuple(run.prefill for run in runs)),
        decode=Samples(tuple(run.decode for run in runs)),
        load=Samples(tuple(run.load for run in runs)),
        optimise=Samples(tuple(run.optimise for run in runs)),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
    )

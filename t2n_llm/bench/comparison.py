"""Archives and rivals in one run: speed over prompt lengths and depths of the cache, load time, memory; by number of threads.

In: contenders and a `ComparisonPlan`. Out: `SpeedComparison`. All are loaded together and take turns, repeat by repeat, so
that whatever else the machine does hits all of them alike: ratios hold on a busy machine, seconds do not.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from generic_export.errors import OptionError
from t2n_llm.bench.compared_engines.archive import ArchiveContender
from t2n_llm.bench.compared_engines.protocol import Contender, Running
from t2n_llm.graph.prefill import chunk_after

PREFILLS = (64, 512, 2048)
DEPTHS = (64, 512, 2048, 8192, 16384)
# A state in which a depth was measured is measured again while that moves the depth by less than this share of it.
_DRIFT = 1 / 8

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonPlan:
    """What to measure.

    Attributes:
        prefills: lengths of prompts, each fed to an empty cache.
        depths: tokens in the cache when the decoding starts.
        decode: tokens fed one by one at each depth, a repeat.
        repeats: how often each is measured.
        warmup: how often each is run before.
        threads: each number is a run of its own.
        positions: most tokens that the model takes, or None; a depth up to there is measured on its last tokens.

    Raises:
        OptionError: a number is too small, or beyond the model's positions.
    """

    prefills: tuple[int, ...] = PREFILLS
    depths: tuple[int, ...] = DEPTHS
    decode: int = 16
    repeats: int = 5
    warmup: int = 1
    threads: tuple[int, ...] = (1,)
    positions: int | None = None

    def __post_init__(self) -> None:
        least = {"prefills": 1, "depths": 0, "decode": 1, "repeats": 1, "warmup": 0, "threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or min(numbers) < minimum:
                raise OptionError(f"{name} is {value}.", f"Use {minimum} or more.")
        longest = max(*self.prefills, *self.depths, *map(self._steps, self.depths))
        if self.positions is not None and longest > self.positions:
            raise OptionError(
                f"the model has {self.positions} positions, but the benchmark needs {longest}.", "Request fewer."
            )

    @property
    def rounds(self) -> int:
        """How often each is run, the warm-up included."""
        return self.warmup + self.repeats

    def is_refilled(self, depth: int) -> bool:
        """Say whether every repeat at a depth fills its cache anew."""
        return self.rounds * self.decode > depth * _DRIFT

    def start_of(self, depth: int) -> int:
        """Return how many tokens are in the cache before the first step: fewer where the model's positions end at the depth."""
        return depth if self.positions is None else min(depth, self.positions - self._steps(depth))

    @property
    def longest(self) -> int:
        """Most tokens that a cache holds."""
        return max(*self.prefills, *(self.start_of(depth) + self._steps(depth) for depth in self.depths))

    def _steps(self, depth: int) -> int:
        """Return how many steps are decoded in one cache."""
        return self.decode if self.is_refilled(depth) else self.rounds * self.decode


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
class Point:
    """The speed of one contender at one place.

    Attributes:
        kind: `prefill` or `decode`.
        tokens: of the prompt, or in the cache.
        speed: tokens a second.
    """

    kind: str
    tokens: int
    speed: Samples


@dataclass(frozen=True)
class SpeedRun:
    """One contender with one number of threads.

    Attributes:
        name: of the contender.
        version: of its program.
        threads: that it was allowed.
        load_seconds: from the first byte read until it could run.
        peak_rss_bytes: largest resident size of its process.
        points: its speeds, in the order of the plan.
    """

    name: str
    version: str
    threads: int
    load_seconds: float
    peak_rss_bytes: int
    points: tuple[Point, ...]

    def speed(self, kind: str, tokens: int) -> Samples:
        """Return what was measured at a place."""
        return next(point.speed for point in self.points if (point.kind, point.tokens) == (kind, tokens))


@dataclass(frozen=True)
class SpeedComparison:
    """Several contenders measured alike; the first is what the others are compared with.

    Attributes:
        plan: what was measured.
        runs: the contenders in order, for the first number of threads, then for the next.
        archives: name -> path, size and bits a weight of the contenders that are archives.
    """

    plan: ComparisonPlan
    runs: tuple[SpeedRun, ...]
    archives: dict[str, dict[str, Any]]

    def with_threads(self, threads: int) -> tuple[SpeedRun, ...]:
        """Return the contenders' runs with one number of threads, in order."""
        return tuple(run for run in self.runs if run.threads == threads)

    def tokens(self, kind: str) -> list[int]:
        """Return the lengths of prompts, or the depths, that were measured, in order."""
        return sorted({point.tokens for run in self.runs for point in run.points if point.kind == kind})

    def ratio(self, run: SpeedRun, kind: str, tokens: int) -> float:
        """Return a contender's speed over the first's, with as many threads: above 1 is faster.

        It is the median of the repeats' ratios: what slowed the machine down for a while is in both of a pair.
        """
        return statistics.median(own / first if first else 0.0 for own, first in self._pairs(run, kind, tokens))

    def advantage(self, run: SpeedRun, kind: str, tokens: int) -> float:
        """Return the first contender's speed over another's, with as many threads: above 1 the first is faster.

        It is the median of the repeats' ratios.
        """
        return statistics.median(first / own if own else 0.0 for own, first in self._pairs(run, kind, tokens))

    def _pairs(self, run: SpeedRun, kind: str, tokens: int) -> Iterator[tuple[float, float]]:
        """Yield the speeds of a contender and of the first, repeat by repeat."""
        first = self.with_threads(run.threads)[0].speed(kind, tokens).values
        yield from zip(run.speed(kind, tokens).values, first, strict=True)

    def asdict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {"plan": asdict(self.plan), "runs": [self._run(run) for run in self.runs], "archives": self.archives}

    def _run(self, run: SpeedRun) -> dict[str, Any]:
        first = self.with_threads(run.threads)[0]
        return {
            "name": run.name,
            "version": run.version,
            "threads": run.threads,
            "load_seconds": run.load_seconds,
            "peak_rss_bytes": run.peak_rss_bytes,
            "peak_rss_ratio_to_first": run.peak_rss_bytes / first.peak_rss_bytes if first.peak_rss_bytes else 0.0,
            "points": [
                {
                    "kind": point.kind,
                    "tokens": point.tokens,
                    "tokens_per_second": point.speed.asdict(),
                    "ratio_to_first": self.ratio(run, point.kind, point.tokens),
                }
                for point in run.points
            ],
        }


def compare(
    contenders: Sequence[Contender], plan: ComparisonPlan, vocabulary: int, progress: Progress
) -> SpeedComparison:
    """Measure contenders against each other.

    Args:
        contenders: the first is what the others are compared with.
        plan: what to measure.
        vocabulary: token ids are random below it, and the same for all.
        progress: told what begins.

    Raises:
        MissingExtraError, EngineMissingError, OptionError, ArchiveError: one cannot take part; all are looked at first.
        EngineError: one refuses the model, fails or dies.
    """
    _check_names([contender.name for contender in contenders])
    for contender in contenders:
        contender.check()
    ids: list[int] = np.random.default_rng(0).integers(0, vocabulary, plan.longest).tolist()
    with tempfile.TemporaryDirectory(prefix="t2n-bench-") as scratch:
        for index, contender in enumerate(contenders):
            progress(f"Preparing {contender.name}")
            folder = Path(scratch, str(index))
            folder.mkdir()
            contender.prepare(folder)
        runs = [run for threads in plan.threads for run in _contest(contenders, plan, threads, ids, progress)]
    archives = {each.name: each.asdict() for each in contenders if isinstance(each, ArchiveContender)}
    return SpeedComparison(plan, tuple(runs), archives)


def _check_names(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"{twice} is listed twice.", "List each compared engine once.")


# --- one number of threads ---------------------------------------------------------------------


class _Contestant:
    """A loaded contender, how full its cache is, and what was measured of it."""

    def __init__(self, contender: Contender, running: Running, ids: list[int]) -> None:
        self.name, self._chunks, self._running, self._ids = contender.name, contender.prefill, running, ids
        self._position = 0  # tokens in the cache; what was there before counts no more
        self.points: list[Point] = []

    def prefill(self, tokens: int) -> float:
        """Return the tokens a second of a prompt."""
        return tokens / sum(self.fill(tokens, anew=True))

    def decode_after(self, tokens: int, steps: int) -> float:
        """Return the tokens a second of some steps after so many tokens, fed to an empty cache."""
        self.fill(tokens, anew=True)
        return self.decode(steps)

    def decode(self, steps: int) -> float:
        """Return the tokens a second of some more steps."""
        turns = [[token] for token in self._ids[self._position : self._position + steps]]
        seconds = self._running.time_turns(turns, fresh=self._position == 0)
        self._position += steps
        return steps / sum(seconds)

    def fill(self, tokens: int, *, anew: bool = False) -> list[float]:
        """Fill the cache up to so many tokens, chunk by chunk; each is a request of its own, as time limits are for one."""
        if anew or self._position > tokens:
            self._position = 0
        seconds: list[float] = []
        while self._position < tokens:
            end = min(self._position + chunk_after(self._position, self._chunks), tokens)
            seconds += self._running.time_turns([self._ids[self._position : end]], fresh=self._position == 0)
            self._position = end
        return seconds

    def run(self, threads: int) -> SpeedRun:
        """Return what was measured."""
        running = self._running
        return SpeedRun(
            self.name, running.version, threads, running.load_seconds, running.peak_rss_bytes(), tuple(self.points)
        )


def _contest(
    contenders: Sequence[Contender], plan: ComparisonPlan, threads: int, ids: list[int], progress: Progress
) -> Iterator[SpeedRun]:
    with ExitStack() as stack:
        contestants = []
        for contender in contenders:
            progress(f"Loading {contender.name} ({_threads_text(threads)})")
            running = stack.enter_context(closing(contender.start(threads, plan.longest)))
            contestants.append(_Contestant(contender, running, ids))
        for tokens in plan.prefills:
            progress(f"Prefill of {tokens} tokens ({_threads_text(threads)})")
            _take_turns(contestants, plan, "prefill", tokens, partial(_Contestant.prefill, tokens=tokens))
        for depth in sorted(plan.depths):
            progress(f"Decoding after {depth} tokens ({_threads_text(threads)})")
            _measure_depth(contestants, plan, depth)
        yield from [one.run(threads) for one in contestants]


def _measure_depth(contestants: Sequence[_Contestant], plan: ComparisonPlan, depth: int) -> None:
    start, steps = plan.start_of(depth), plan.decode
    if plan.is_refilled(depth):
        measure = partial(_Contestant.decode_after, tokens=start, steps=steps)
    else:
        measure = partial(_Contestant.decode, steps=steps)
        for one in contestants:
            one.fill(start)
    _take_turns(contestants, plan, "decode", depth, measure)


def _take_turns(
    contestants: Sequence[_Contestant],
    plan: ComparisonPlan,
    kind: str,
    tokens: int,
    measure: Callable[[_Contestant], float],
) -> None:
    """Measure one thing of all, repeat by repeat; each repeat begins with another one, so that nobody always follows the same."""
    speeds: dict[str, list[float]] = {one.name: [] for one in contestants}
    for number in range(plan.rounds):
        first = number % len(contestants)
        for one in (*contestants[first:], *contestants[:first]):
            speeds[one.name].append(measure(one))
    for one in contestants:
        one.points.append(Point(kind, tokens, Samples(tuple(speeds[one.name][plan.warmup :]))))


def _threads_text(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


__all__ = ["DEPTHS", "PREFILLS", "ComparisonPlan", "Point", "Samples", "SpeedComparison", "SpeedRun", "compare"]

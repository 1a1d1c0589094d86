"""`t2n-llm bench --against`: from options to a comparison, and the comparison as tables and as a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.wheel import TractWheel
from generic_export.sizes import size_text
from t2n_llm.bench.benchmark import BenchPlan, Samples
from t2n_llm.bench.compared_engines import compared_engine
from t2n_llm.bench.compared_engines.archive import ArchiveContender
from t2n_llm.bench.compared_engines.protocol import Contender, SharedModel, processors
from t2n_llm.bench.comparison import DEPTHS, PREFILLS, ComparisonPlan, SpeedComparison, SpeedRun, compare
from t2n_llm.cli.bench_plot import draw_bars, figure_class, save
from t2n_llm.cli.tables import table_of
from t2n_llm.export.located import LocatedArchive, distinct_names
from t2n_llm.source.reference import SourceRef

if TYPE_CHECKING:
    from rich.table import Table

    from generic_export.inference_target.tract.engines.cli import TractCli

_ALL = "all"
_LINES = ("-", "--", ":", "-.")  # one a number of threads
_COLOURS = ("#4878a8", "#c85a3c", "#5a9a5a", "#8a6bb0", "#b0883c", "#7a7a7a")


@dataclass(frozen=True)
class Grid:
    """The lists of numbers that the options give; None where one was left out."""

    prefills: tuple[int, ...] | None
    depths: tuple[int, ...] | None
    threads: tuple[int, ...] | None

    @staticmethod
    def parse(prefill: str | None, depth: str | None, threads: str | None) -> Grid:
        """Read the options.

        Raises:
            OptionError: one is no list of numbers.
        """
        return Grid(_numbers("--prefill", prefill), _numbers("--depth", depth), _numbers("--threads", threads))

    @property
    def is_single(self) -> bool:
        """Whether a bench of one prompt and one depth, with the engine's own threads, was asked for."""
        return self.threads is None and self.is_one_place

    @property
    def is_one_place(self) -> bool:
        """Whether there is one prompt and one depth."""
        return all(len(each or (0,)) == 1 for each in (self.prefills, self.depths))

    @property
    def only_threads(self) -> int:
        """The one number of threads; 1 by default.

        Raises:
            OptionError: there are several.
        """
        if len(self.threads or (1,)) > 1:
            raise OptionError("--engine cli takes one number of threads.", "Give one: --threads 2.")
        return (self.threads or (1,))[0]

    @property
    def prefill(self) -> int:
        """The one length of a prompt."""
        return self.prefills[0] if self.prefills else BenchPlan.prefill

    @property
    def depth(self) -> int:
        """The one depth."""
        return self.depths[0] if self.depths else BenchPlan.depth

    def plan(self, archives: Sequence[LocatedArchive], decode: int | None, repeats: int, warmup: int) -> ComparisonPlan:
        """Return what to measure; of what was left out, as much as the archives have positions for.

        Raises:
            OptionError: a number is too small, or beyond the archives' positions.
        """
        known = [archive.max_positions for archive in archives if archive.max_positions is not None]
        positions = min(known, default=None)
        return ComparisonPlan(
            prefills=self.prefills or _fitting(PREFILLS, positions),
            depths=self.depths if self.depths is not None else _fitting(DEPTHS, positions),
            decode=decode or ComparisonPlan.decode,
            repeats=repeats,
            warmup=warmup,
            threads=self.threads or tuple(dict.fromkeys((1, processors()))),
            positions=positions,
        )


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not word.isdecimal() and (option, word) != ("--threads", _ALL)), None)
    if wrong is not None:
        raise OptionError(f"{option} {text}: {wrong!r} is no number.", "Give numbers with commas between: 64,512.")
    return tuple(dict.fromkeys(processors() if word == _ALL else int(word) for word in words))


def _fitting(numbers: tuple[int, ...], positions: int | None) -> tuple[int, ...]:
    fitting = tuple(number for number in numbers if positions is None or number <= positions)
    return fitting or (max(1, (positions or 2) // 2),)


def run_comparison(
    archives: Sequence[LocatedArchive],
    against: Sequence[str],
    checkpoint: str | None,
    engine: TractWheel | TractCli,
    plan: ComparisonPlan,
    progress: Callable[[str], None],
) -> SpeedComparison:
    """Measure archives and rivals against each other; the rivals run the first archive's model.

    Raises:
        OptionError: a rival or its variant is unknown or runs on the CPU only, or the engine is not the wheel.
        T2NError: as `compare`.
    """
    if not isinstance(engine, TractWheel):
        raise OptionError("comparisons are measured with tract from pip.", "Leave --engine and --tract out.")
    source = SourceRef(checkpoint) if checkpoint else None
    subject = SharedModel(archives[0], source, engine.timeout_seconds, engine.device)
    contenders: list[Contender] = [
        ArchiveContender(archive, name, engine.timeout_seconds, engine.device)
        for archive, name in zip(archives, distinct_names(archives), strict=True)
    ]
    contenders += [compared_engine(text, subject) for text in against]
    vocabulary = min((archive.vocab_size or 1 for archive in archives), default=1)
    return compare(contenders, plan, vocabulary, progress)


# --- for people -----------------------------------------------------------------------------------


def comparison_tables(comparison: SpeedComparison) -> Iterator[Any]:
    """Yield what is shown: a line on what was measured, and a table for each number of threads."""
    from rich.markup import escape

    plan = comparison.plan
    yield (
        f"tokens a second: median of {plan.repeats}, contenders in turn; decoding: {plan.decode} steps; "
        "± half the distance from slowest to fastest; x: speed of the first over that of another, above 1 is faster, median of the "
        "repeats"
    )
    for run in comparison.with_threads(plan.threads[0]):
        yield f"[dim]{escape(run.name)}: {escape(run.version)}[/dim]"
    for threads in plan.threads:
        yield _table(comparison, threads)


def _table(comparison: SpeedComparison, threads: int) -> Table:
    from rich.markup import escape

    runs = comparison.with_threads(threads)
    heading = "1 thread" if threads == 1 else f"{threads} threads"
    ratios = (f">{escape(runs[0].name)} / {escape(run.name)}" for run in runs[1:])
    table = table_of(heading, *(f">{escape(run.name)}" for run in runs), *ratios)
    for point in runs[0].points:
        label = f"prefill {point.tokens}" if point.kind == "prefill" else f"decode after {point.tokens}"
        place = point.kind, point.tokens
        speeds = (_speed(run, *place) for run in runs)
        table.add_row(label, *speeds, *(f"{comparison.advantage(run, *place):.2f}x" for run in runs[1:]))
    nothing = [""] * (len(runs) - 1)
    table.add_row("load, s", *(f"{run.load_seconds:.2f}" for run in runs), *nothing)
    table.add_row("peak memory", *(size_text(run.peak_rss_bytes) for run in runs), *nothing)
    return table


def _speed(run: SpeedRun, kind: str, tokens: int) -> str:
    samples = run.speed(kind, tokens)
    spread = f" ±{samples.spread:.0%}" if len(samples.values) > 1 else ""
    return f"{samples.median:,.1f}{spread}"


# --- a chart --------------------------------------------------------------------------------------


def plot_comparison(comparison: SpeedComparison, path: Path) -> None:
    """Draw speed over prompt length and over depth, load time and memory; a line style for each number of threads.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArchiveError: the file cannot be written.
    """
    figure = figure_class()(figsize=(12.0, 7.0), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_lines(axes[0][0], comparison, "prefill", "tokens of the prompt")
    _draw_lines(axes[0][1], comparison, "decode", "tokens in the cache")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7, handlelength=4
    )
    runs = comparison.with_threads(comparison.plan.threads[0])
    names = [run.name for run in runs]
    draw_bars(axes[1][0], "load, seconds", names, [Samples((run.load_seconds,)) for run in runs])
    draw_bars(axes[1][1], "peak memory, MB", names, [Samples((run.peak_rss_bytes / 1e6,)) for run in runs])
    save(figure, path)


def _draw_lines(axis: Any, comparison: SpeedComparison, kind: str, places: str) -> None:
    names = list(dict.fromkeys(run.name for run in comparison.runs))
    for run in comparison.runs:
        points = sorted((point for point in run.points if point.kind == kind), key=lambda point: point.tokens)
        threads = comparison.plan.threads.index(run.threads)
        axis.plot(
            [point.tokens for point in points],
            [point.speed.median for point in points],
            marker="o",
            markersize=4,
            linestyle=_LINES[threads % len(_LINES)],
            color=_COLOURS[names.index(run.name) % len(_COLOURS)],
            label=f"{run.name}, {run.threads} thread{'s' * (run.threads > 1)}",
        )
    tokens = sorted({point.tokens for run in comparison.runs for point in run.points if point.kind == kind})
    axis.set_xscale("symlog" if 0 in tokens else "log", base=2)
    axis.set_xticks(tokens, [f"{number:,}" for number in tokens])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(f"{kind}, tokens/s", fontsize=9)
    axis.set_xlabel(places, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


__all__ = ["Grid", "comparison_tables", "plot_comparison", "run_comparison"]

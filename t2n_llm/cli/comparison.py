"""`t2n-llm bench`: from options to a plan, and what was measured as tables and as a chart (matplotlib, an extra)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generic_export.errors import ArchiveError, MissingExtraError, OptionError
from generic_export.sizes import size_text
from t2n_llm.bench.benchmark import DECODE_TOKENS, PREFILL_TOKENS
from t2n_llm.bench.compared_engines.protocol import processors
from t2n_llm.bench.comparison import DEPTHS, PREFILLS, ComparisonPlan, Samples, SpeedComparison, SpeedRun
from t2n_llm.cli.tables import table_of
from t2n_llm.export.archive_lookup import LocatedArchive

if TYPE_CHECKING:
    from rich.table import Table

_ALL = "all"
_LINES = ("-", "--", ":", "-.")  # one a number of threads
_BAR = "#4878a8"
_ERROR_BAR = "#222222"
_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#4878a8", "#c85a3c", "#5a9a5a", "#8a6bb0", "#b0883c", "#7a7a7a")


@dataclass(frozen=True)
class Grid:
    """The lists of numbers that the options give; None where one was left out."""

    prefills: tuple[int, ...] | None
    depths: tuple[int, ...] | None
    threads: tuple[int, ...] | None

    @property
    def only_threads(self) -> int:
        """The one number of threads; 1 by default.

        Raises:
            OptionError: there are several.
        """
        if len(self.threads or (1,)) > 1:
            raise OptionError("--engine cli takes a single number of threads.", "Use for example --threads 2.")
        return (self.threads or (1,))[0]

    @staticmethod
    def parse(prefill: str | None, depth: str | None, threads: str | None) -> Grid:
        """Read the options.

        Raises:
            OptionError: one is no list of numbers.
        """
        return Grid(_numbers("--prefill", prefill), _numbers("--depth", depth), _numbers("--threads", threads))

    def plan(
        self, archives: Sequence[LocatedArchive], decode: int | None, repeats: int, warmup: int, *, against: bool
    ) -> ComparisonPlan:
        """Return what to measure; of what was left out, as much as the archives have positions for.

        Args:
            archives: what is measured.
            decode: tokens fed one by one at each depth; None for the default.
            repeats: how often each is measured.
            warmup: how often each is run before.
            against: other engines take part; the defaults are many places and numbers of threads then.

        Raises:
            OptionError: a number is too small, or beyond the archives' positions.
        """
        known = [archive.max_positions for archive in archives if archive.max_positions is not None]
        positions = min(known, default=None)
        return ComparisonPlan(
            prefills=self.prefills or _fitting(PREFILLS if against else (PREFILL_TOKENS,), positions),
            depths=self.depths or (_fitting(DEPTHS, positions) if against else (0,)),
            decode=decode or (ComparisonPlan.decode if against else DECODE_TOKENS),
            repeats=repeats,
            warmup=warmup,
            threads=self.threads or (tuple(dict.fromkeys((1, processors()))) if against else (1,)),
            positions=positions,
        )


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not word.isdecimal() and (option, word) != ("--threads", _ALL)), None)
    if wrong is not None:
        raise OptionError(f"{option} {text}: {wrong!r} is not a number.", "Separate numbers by commas: 64,512.")
    return tuple(dict.fromkeys(processors() if word == _ALL else int(word) for word in words))


def _fitting(numbers: tuple[int, ...], positions: int | None) -> tuple[int, ...]:
    fitting = tuple(number for number in numbers if positions is None or number <= positions)
    return fitting or (max(1, (positions or 2) // 2),)


# --- for people -----------------------------------------------------------------------------------


def comparison_tables(comparison: SpeedComparison) -> Iterator[Any]:
    """Yield what is shown: a line on what was measured, and a table for each number of threads."""
    from rich.markup import escape

    plan = comparison.plan
    several = len(comparison.with_threads(plan.threads[0])) > 1
    yield (
        f"tokens per second: median of {plan.repeats} runs{', in turn' * several}; decoding: {plan.decode} steps; "
        "± half the range"
        + "; x: speed of the first divided by that of the other (above 1 is faster), median of the runs"
        * several
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
    stored = (comparison.archives.get(run.name, {}).get("archive_bytes") for run in runs)
    table.add_row("size on disk", *("" if size is None else size_text(size) for size in stored), *nothing)
    return table


def _speed(run: SpeedRun, kind: str, tokens: int) -> str:
    samples = run.speed(kind, tokens)
    spread = f" ±{samples.spread:.0%}" if len(samples.values) > 1 else ""
    return f"{samples.median:,.1f}{spread}"


# --- a chart --------------------------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Refuse early, before minutes of measuring.

    Raises:
        OptionError: the suffix is no picture's, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"{path}: not an image file name.", f"Use one of {', '.join(_SUFFIXES)}.")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{path}: the folder {path.parent} does not exist.", "Create it first.")
    _figure_class()


def plot_comparison(comparison: SpeedComparison, path: Path) -> None:
    """Draw speed over prompt length and over depth, load time and memory; a line style for each number of threads.

    Where one length or one depth was measured with one number of threads, its speeds are bars.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArchiveError: the file cannot be written.
    """
    figure = _figure_class()(figsize=(12.0, 7.0), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_speeds(axes[0][0], comparison, "prefill", "prompt tokens")
    _draw_speeds(axes[0][1], comparison, "decode", "cached tokens")
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes[0]), key=lambda found: len(found[1]))
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7, handlelength=4)
    runs = comparison.with_threads(comparison.plan.threads[0])
    names = [run.name for run in runs]
    _draw_bars(axes[1][0], "load, seconds", names, [Samples((run.load_seconds,)) for run in runs])
    _draw_bars(axes[1][1], "peak memory, MB", names, [Samples((run.peak_rss_bytes / 1e6,)) for run in runs])
    _save(figure, path)


def _draw_speeds(axis: Any, comparison: SpeedComparison, kind: str, places: str) -> None:
    runs, tokens = comparison.runs, comparison.tokens(kind)
    if len(tokens) > 1 or len(comparison.plan.threads) > 1:
        _draw_lines(axis, comparison, kind, places)
    else:
        speeds = [run.speed(kind, *tokens) for run in runs]
        _draw_bars(axis, f"{kind}, tokens/s, {tokens[0]:,} {places}", [run.name for run in runs], speeds)


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
    tokens = comparison.tokens(kind)
    axis.set_xscale("symlog" if 0 in tokens else "log", base=2)
    axis.set_xticks(tokens, [f"{number:,}" for number in tokens])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(f"{kind}, tokens/s", fontsize=9)
    axis.set_xlabel(places, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_bars(axis: Any, title: str, names: list[str], samples: list[Samples]) -> None:
    """Draw a bar for each sample, the first on top, with its median and its reach."""
    medians = [sample.median for sample in samples]
    places = range(len(names))
    below = [sample.median - min(sample.values) for sample in samples]
    above = [max(sample.values) - sample.median for sample in samples]
    several = any(len(sample.values) > 1 for sample in samples)
    axis.barh(places, medians, height=0.6, color=_BAR)
    if several:
        axis.errorbar(medians, places, xerr=[below, above], fmt="none", ecolor=_ERROR_BAR, capsize=3, linewidth=1)
    top = max(sample.median + high for sample, high in zip(samples, above, strict=True))
    for place, sample, high in zip(places, samples, above, strict=True):
        axis.text(sample.median + high + 0.02 * top, place, _short(sample.median), va="center", fontsize=8)
    axis.set_yticks(places, names)
    axis.set_ylim(len(names) - 0.4, -0.6)  # the first archive on top
    axis.set_xlim(0, 1.25 * top if top else 1.0)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _save(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        ArchiveError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be written: {error.strerror or error}.") from error


def _figure_class() -> Any:
    """Return matplotlib's figure, which needs no display.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"matplotlib, which draws charts, cannot be imported: {error}.",
            "Install it with pip install 't2n-llm[plot]', or omit --plot.",
        ) from None
    return Figure


__all__ = ["Grid", "check_plot", "comparison_tables", "plot_comparison"]

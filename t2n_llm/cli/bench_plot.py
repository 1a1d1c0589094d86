"""A bar chart of a bench report. In: `BenchReport`. Out: a PNG. matplotlib is an extra and is imported here only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, MissingExtraError, OptionError
from t2n_llm.bench.benchmark import BenchReport, Samples

_BAR = "#4878a8"
_ERROR_BAR = "#222222"
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse early, before minutes of measuring.

    Raises:
        OptionError: the suffix is no picture's, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"{path}: not the name of a picture.", f"Use one of {', '.join(_SUFFIXES)}.")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{path}: the folder {path.parent} does not exist.", "Create it first.")
    figure_class()


def plot_bench(report: BenchReport, path: Path) -> None:
    """Draw prefill, decode, load and memory of every archive, one panel each.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArchiveError: the file cannot be written.
    """
    plan = report.plan
    figure = figure_class()(figsize=(11.0, 2.2 + 0.75 * len(report.archives)), layout="constrained")
    figure.suptitle(f"tract {report.engine_version} ({report.engine}, {report.device})", fontsize=11)
    depth = f" at depth {plan.depth}" if plan.depth else ""
    panels: list[tuple[str, list[Samples]]] = [
        (f"prefill, pp{plan.prefill}\ntokens/s", [entry.prefill for entry in report.archives]),
        (f"decode, tg{plan.decode}{depth}\ntokens/s", [entry.decode for entry in report.archives]),
        ("load and optimise\nseconds", [_total(entry.load, entry.optimise) for entry in report.archives]),
        ("peak memory\nMB", [Samples((entry.peak_rss_bytes / 1e6,)) for entry in report.archives]),
    ]
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (title, samples) in zip(axes, panels, strict=True):
        draw_bars(axis, title, [entry.name for entry in report.archives], samples)
    save(figure, path)


def draw_bars(axis: Any, title: str, names: list[str], samples: list[Samples]) -> None:
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


def _total(load: Samples, optimise: Samples) -> Samples:
    return Samples(tuple(first + second for first, second in zip(load.values, optimise.values, strict=True)))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def save(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        ArchiveError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be written: {error.strerror or error}.") from error


def figure_class() -> Any:
    """Return matplotlib's figure, which needs no display.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"charts are drawn with matplotlib, which does not import here: {error}.",
            "Install it: pip install 't2n-llm[plot]', or leave --plot out.",
        ) from None
    return Figure

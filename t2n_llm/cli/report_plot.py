"""The error of each tensor of an export, by layer, as a picture or a page.

In: a `QuantizeReport`. Out: a page, a PNG, or what else matplotlib can write. matplotlib is an optional extra, loaded here
only; a page does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generic_export.errors import ArchiveError, OptionError
from generic_export.files import write_whole
from generic_export.pages import render
from generic_export.pages.chart import Chart, Line, line_chart
from t2n_llm.cli.report_tables import beside_gguf, by_kind, by_tensor, largest_errors
from t2n_llm.inspect.quantize_report import QuantizeReport, TensorQuality

_INCHES = (9.0, 5.0)
_DOTS = 150
_DECADE = 10.0
_MARKERS = "os^vDPX*<>hp"


def require_plotting(path: Path) -> None:
    """Refuse a plot that could not be drawn in the end.

    Raises:
        OptionError: matplotlib is not installed, or it writes no files of that kind.
    """
    if _is_page(path):
        return
    figure, _ = _axes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise OptionError(
            f"--plot {path}: {path.suffix or 'a name without suffix'} is not a supported image format.",
            "Use .png, or .html.",
        )


def plot_report(report: QuantizeReport, path: Path) -> None:
    """Draw the relative squared error of the quantised tensors by layer, one line for each kind of tensor.

    Args:
        report: of an export.
        path: the picture to write; its suffix says which form. `.html` is a page with all that the report knows.

    Raises:
        OptionError: matplotlib is not installed.
        ArchiveError: the file cannot be written.
    """
    try:
        if _is_page(path):
            write_whole(path, report_html(report))
        else:
            _drawn(report).savefig(path, dpi=_DOTS, bbox_inches="tight")
    except OSError as error:
        raise ArchiveError(
            f"{path}: cannot be written: {error.strerror}.", "Choose another file for --plot."
        ) from error


def _is_page(path: Path) -> bool:
    return path.suffix.lower() == ".html"


def _drawn(report: QuantizeReport) -> Any:
    """Return the figure."""
    figure, axes = _axes()
    drawn = [tensor for tensor in report.tensors if tensor.quantized and tensor.drawn_error]
    kinds = list(dict.fromkeys(tensor.kind for tensor in drawn if tensor.layer is not None))
    for index, kind in enumerate(kinds):
        points = [tensor for tensor in drawn if tensor.kind == kind and tensor.layer is not None]
        axes.plot(
            [tensor.layer for tensor in points],
            [tensor.drawn_error for tensor in points],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linewidth=1,
            label=kind,
        )
    for tensor in drawn:
        if tensor.layer is None:
            axes.axhline(tensor.drawn_error, linestyle="--", linewidth=1, color="gray", label=tensor.kind)
    _label(axes, report, drawn)
    return figure


def _label(axes: Any, report: QuantizeReport, drawn: Sequence[TensorQuality]) -> None:
    quality = report.quality
    axes.set_title(
        f"{report.folder}: {report.recipe}, {report.bits_per_weight:.2f} bits per weight\n"
        f"mean KL {quality.mean_kl_divergence:.3g}, same token {100 * quality.same_top1_share:.1f} %, perplexity "
        f"{quality.perplexity:.2f} (reference {quality.reference_perplexity:.2f})",
        fontsize=10,
    )
    axes.set_xlabel("decoder layer")
    outputs = any(tensor.relative_error is None for tensor in drawn)
    axes.set_ylabel(f"squared error / energy of the {'outputs (scaled weights)' if outputs else 'weights'}")
    axes.grid(visible=True, which="both", linewidth=0.3)
    if not drawn:
        axes.text(0.5, 0.5, "nothing is quantized", ha="center", transform=axes.transAxes)
        return
    _scale(
        axes,
        [tensor.drawn_error for tensor in drawn if tensor.drawn_error],
        [t.layer for t in drawn if t.layer is not None],
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _scale(axes: Any, errors: Sequence[float], layers: Sequence[int]) -> None:
    """Number the axes: errors by decades only where there are some."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if max(errors) > _DECADE * min(errors):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if layers and min(layers) == max(layers):
        axes.set_xlim(layers[0] - 0.5, layers[0] + 0.5)


def _axes() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("plots need matplotlib, which is not installed.", "pip install 't2n-llm[plot]'") from error
    figure = Figure(figsize=_INCHES)
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


# --- page --------------------------------------------------------------------------------------------


def report_html(report: QuantizeReport) -> str:
    """Return the page."""
    quality = report.quality
    worst = {tensor.label for tensor in largest_errors(report.tensors)}
    return render(
        __package__,
        "quantize.html.j2",
        title=f"Compression of {report.folder}",
        report=report,
        figures=[
            ("bits per weight", f"{report.bits_per_weight:.2f}"),
            ("MB of weights", f"{report.bytes / 1e6:.1f}"),
            ("mean KL divergence", f"{quality.mean_kl_divergence:.3g}"),
            ("99 % KL divergence", f"{quality.p99_kl_divergence:.3g}"),
            ("same most likely token", f"{100 * quality.same_top1_share:.1f} %"),
            (f"perplexity (reference {quality.reference_perplexity:.2f})", f"{quality.perplexity:.2f}"),
        ],
        chart=_chart(report),
        beside=beside_gguf(report) if report.rivals else None,
        kinds=by_kind(report.tensors),
        tensors=by_tensor("tensors", report.tensors),
        worst={index for index, tensor in enumerate(report.tensors) if tensor.label in worst},
    )


def _chart(report: QuantizeReport) -> Chart:
    """Draw the errors of the quantised tensors by layer, one line for each kind."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for tensor in report.tensors:
        if tensor.quantized and tensor.drawn_error and tensor.layer is not None:
            told = f"{tensor.label}: {tensor.drawn_error:.2e}"
            points.setdefault(tensor.kind, []).append((tensor.layer, tensor.drawn_error, told))
    errors = [error for line in points.values() for _, error, _ in line] or [1.0]
    layers = sorted({layer for line in points.values() for layer, _, _ in line})
    decades = max(errors) > _DECADE * min(errors)
    return line_chart(
        "squared error relative to energy, by decoder layer",
        [Line(kind, tuple(line)) for kind, line in points.items()],
        [(height, f"{height:.1e}") for height in (_decades if decades else _steps)(min(errors), max(errors))],
        [(layer, f"layer {layer:.0f}") for layer in dict.fromkeys((*layers[:1], *layers[-1:]))],
        scale=math.log10 if decades else float,
    )


def _decades(lowest: float, highest: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)]


def _steps(lowest: float, highest: float) -> list[float]:
    low, high = 0.98 * lowest, 1.02 * highest
    return [low + part * (high - low) for part in (0, 0.25, 0.5, 0.75, 1)]

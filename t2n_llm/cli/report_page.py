"""A `QuantizeReport` as one self-contained HTML page: the end effect, the error by layer, and every tensor."""

from __future__ import annotations

import math

from generic_export.pages import render
from generic_export.pages.chart import Chart, Line, line_chart
from t2n_llm.cli.report_tables import beside_gguf, by_kind, by_tensor, largest_errors
from t2n_llm.inspect.quantize_report import QuantizeReport

_DECADE = 10.0  # errors are drawn by decades only where there are some


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

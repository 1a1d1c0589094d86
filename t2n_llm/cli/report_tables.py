"""A `QuantizeReport` as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from t2n_llm.measure.quantize_report import QuantizeReport, TensorQuality

_WORST = 8  # tensors that are shown by name


def quality_tables(report: QuantizeReport) -> list[Table]:
    """Return the end effect, the errors by kind of tensor, and the tensors with the largest error."""
    quantized = [tensor for tensor in report.tensors if tensor.quantized]
    tables = [_effect(report)]
    if quantized:
        worst = sorted(quantized, key=lambda tensor: _sortable(tensor), reverse=True)[:_WORST]
        tables += [_kinds(report.tensors), _named(worst)]
    return tables


def _effect(report: QuantizeReport) -> Table:
    quality = report.quality
    table = Table(title=escape(f"{report.folder}: {report.recipe}, against {report.reference}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    change = quality.perplexity / quality.reference_perplexity - 1
    for name, value in (
        ("weights", f"{report.bytes / 1e6:.1f} MB, {report.bits_per_weight:.2f} bits per weight"),
        ("KL divergence", f"mean {quality.mean_kl:.4g}, 99 % {quality.tail_kl:.4g}, worst {quality.max_kl:.4g}"),
        ("same most likely token", f"{100 * quality.same_top1:.1f} %"),
        ("perplexity", f"{quality.perplexity:.3f} ({change:+.2%} on {quality.reference_perplexity:.3f})"),
    ):
        table.add_row(name, value)
    return table


def _kinds(tensors: Sequence[TensorQuality]) -> Table:
    rows = []
    for kind in dict.fromkeys(tensor.kind for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.kind == kind]
        values = sum(tensor.values for tensor in members)
        schemes = ", ".join(dict.fromkeys(_scheme(tensor) for tensor in members))
        bits = sum(tensor.bits * tensor.values for tensor in members) / values
        errors = (_mean(tensor.relative_error for tensor in members), _mean(tensor.output_error for tensor in members))
        rows.append(([kind.removeprefix("model."), str(len(members)), schemes, f"{bits:.2f}"], errors))
    return _error_table("by kind of tensor", ("kind", "count", "stored as", "bits"), rows)


def _named(worst: Sequence[TensorQuality]) -> Table:
    rows = [
        (
            [tensor.label.removesuffix(".weight").removeprefix("model."), _scheme(tensor)],
            (tensor.relative_error, tensor.output_error),
        )
        for tensor in worst
    ]
    return _error_table("largest errors", ("tensor", "stored as"), rows)


_Errors = tuple[float | None, float | None]


def _error_table(title: str, headings: Sequence[str], rows: Sequence[tuple[Sequence[str], _Errors]]) -> Table:
    """Return a table of words, then of the errors of weights and of outputs; a column in which nothing is known is left out."""
    known = [any(errors[index] is not None for _, errors in rows) for index in range(2)]
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(
            heading, no_wrap=True, justify="left" if index in (0, headings.index("stored as")) else "right"
        )
    for heading, shown in (("rel. MSE", known[0]), ("SNR", known[0]), ("outputs", known[1])):
        if shown:
            table.add_column(heading, justify="right", no_wrap=True)
    for words, (weights, outputs) in rows:
        figures = [_scientific(weights), _decibels(weights)] if known[0] else []
        table.add_row(*map(escape, words), *figures, *([_scientific(outputs)] if known[1] else []))
    return table


def _scientific(error: float | None) -> str:
    return "-" if error is None else f"{error:.2e}"


def _decibels(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else "exact"


def _mean(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _scheme(tensor: TensorQuality) -> str:
    return f"{tensor.scheme}:{tensor.algorithm}" if tensor.algorithm else tensor.scheme


def _sortable(tensor: TensorQuality) -> float:
    return max(tensor.relative_error or 0.0, tensor.output_error or 0.0)

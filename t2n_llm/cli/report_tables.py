"""A `QuantizeReport` as rows of text, for the terminal and for its page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from t2n_llm.cli.tables import filled_table

if TYPE_CHECKING:
    from rich.table import Table

    from t2n_llm.inspect.quantize_report import QuantizeReport, TensorQuality

_WORST = 8  # tensors that are shown by name
_Errors = tuple[float | None, float | None]


@dataclass(frozen=True)
class Sheet:
    """A table of text: its title, headings (those of numbers begin with `>`), and rows."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def quality_tables(report: QuantizeReport) -> list[Table]:
    """Return the end effect, the errors by kind of tensor, and the tensors with the largest error."""
    title = f"{report.folder}: {report.recipe}, against {report.reference}"
    effect = filled_table(("", ">"), end_effect(report), title)
    effect.show_header = False
    worst = largest_errors(report.tensors)
    sheets = [by_kind(report.tensors), by_tensor("largest errors", worst)] if worst else []
    sheets = [*([beside_gguf(report)] if report.rivals else []), *sheets]
    return [effect, *(filled_table(sheet.headings, sheet.rows, sheet.title) for sheet in sheets)]


def end_effect(report: QuantizeReport) -> list[tuple[str, str]]:
    """Return what compression does to the model's predictions, and what it saves."""
    quality = report.quality
    change = quality.perplexity / quality.reference_perplexity - 1
    return [
        ("weights", f"{report.bytes / 1e6:.1f} MB, {report.bits_per_weight:.2f} bits per weight"),
        (
            "KL divergence",
            f"mean {quality.mean_kl_divergence:.4g}, 99 % {quality.p99_kl_divergence:.4g}, worst {quality.max_kl_divergence:.4g}",
        ),
        ("same most likely token", f"{100 * quality.same_top1_share:.1f} %"),
        ("perplexity", f"{quality.perplexity:.3f} ({change:+.2%} on {quality.reference_perplexity:.3f})"),
    ]


def beside_gguf(report: QuantizeReport) -> Sheet:
    """Return the export and its rivals, a row each."""
    shown = [(report.folder, report.bytes, report.bits_per_weight, report.quality)]
    shown += [(rival.name, rival.bytes, rival.bits_per_weight, rival.quality) for rival in report.rivals]
    return Sheet(
        "beside GGUF, on the same text",
        ("values of", ">MB", ">bits", ">mean KL", ">99 %", ">same token", ">perplexity"),
        tuple(
            (
                name,
                f"{size / 1e6:.1f}",
                f"{bits:.2f}",
                f"{quality.mean_kl_divergence:.4g}",
                f"{quality.p99_kl_divergence:.4g}",
                f"{100 * quality.same_top1_share:.1f} %",
                f"{quality.perplexity:.3f}",
            )
            for name, size, bits, quality in shown
        ),
    )


def largest_errors(tensors: Sequence[TensorQuality]) -> list[TensorQuality]:
    """Return the quantised tensors with the largest errors, the largest first."""
    return sorted((tensor for tensor in tensors if tensor.quantized), key=_sortable, reverse=True)[:_WORST]


def by_kind(tensors: Sequence[TensorQuality]) -> Sheet:
    """Return a row for all tensors of a kind, such as `mlp.down_proj`."""
    rows = []
    for kind in dict.fromkeys(tensor.kind for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.kind == kind]
        values = sum(tensor.values for tensor in members)
        schemes = ", ".join(dict.fromkeys(_scheme(tensor) for tensor in members))
        bits = sum(tensor.bits * tensor.values for tensor in members) / values
        errors = (_mean(tensor.relative_error for tensor in members), _mean(tensor.output_error for tensor in members))
        rows.append(((kind.removeprefix("model."), str(len(members)), schemes, f"{bits:.2f}"), errors))
    return _error_sheet("by kind of tensor", ("kind", ">count", "stored as", ">bits"), rows)


def by_tensor(title: str, tensors: Sequence[TensorQuality]) -> Sheet:
    """Return a row a tensor."""
    rows = [
        (
            (tensor.label.removesuffix(".weight").removeprefix("model."), _scheme(tensor)),
            (tensor.relative_error, tensor.output_error),
        )
        for tensor in tensors
    ]
    return _error_sheet(title, ("tensor", "stored as"), rows)


def _error_sheet(title: str, headings: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], _Errors]]) -> Sheet:
    """Return words, then errors of weights and of outputs; a column in which nothing is known is left out."""
    weights, outputs = (any(errors[index] is not None for _, errors in rows) for index in range(2))
    headings += (">rel. MSE", ">SNR") * weights + (">outputs",) * outputs
    return Sheet(title, headings, tuple(
        words + (_scientific(error), _decibels(error)) * weights + (_scientific(output),) * outputs
        for words, (error, output) in rows
    ))  # fmt: skip


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

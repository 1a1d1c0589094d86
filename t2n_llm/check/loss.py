"""The warning that compression changed a model by a lot, with the recipes that change it less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t2n_llm.check.agreement import Agreement, ValidationReport
    from t2n_llm.reporter import Reporter

LARGE_MEAN_KL = 0.1
"""Mean KL divergence from the original, in nats, above which a compressed model is worth a warning."""

_CALIBRATED = "q4_0:gptq (same size, chosen by calibration)"
_LARGER = "q4_0-mixed (about 10 % larger)"
_TWICE = "q4_0x2 (nine bits a weight, nearly exact)"


def warn_of_loss(report: ValidationReport, compression: Mapping[str, Any] | None, reporter: Reporter) -> None:
    """Warn where a compressed model differs from its original by a lot.

    Args:
        report: of its check.
        compression: what export.json records of it; None without compression.
        reporter: receives the warning.
    """
    original = report.original
    if compression is None or original is None or original.mean_kl_divergence <= LARGE_MEAN_KL:
        return
    recipe = str(compression["recipe"]["name"])
    advice = f" Closer: --compress {', '.join(_ways_out(recipe))}." if "q4_0x2" not in recipe else ""
    reporter.warn(f"{recipe} changes this model a lot: {difference(original)}.{advice}")


def difference(original: Agreement) -> str:
    """Return how far a compressed model is from its original, in words."""
    return (
        f"mean KL {original.mean_kl_divergence:.2g}, worst {original.max_kl_divergence:.2g}, "
        f"same token {original.same_top1_count}/{original.positions}"
    )


def _ways_out(recipe: str) -> list[str]:
    name, _, algorithm = recipe.partition(":")
    calibrated = algorithm not in ("", "search", "min_max")
    mixed = name == "q4_0-mixed"
    return [*([] if calibrated else [_CALIBRATED]), *([] if mixed else [_LARGER]), _TWICE]


__all__ = ["LARGE_MEAN_KL", "difference", "warn_of_loss"]

"""One check for a family: a tiny random model of it through `export_llm`, all four checks in the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from t2n_llm import export_llm
from t2n_llm.source.small_sizes import WINDOW
from t2n_llm.zoo import overrides
from t2n_llm.zoo.tiny_model import build_tiny_model, save_tiny_model

MAX_ABS_ERROR = 1e-4
DECODE_STEPS = 16
PROMPT = 12


def export_family(family: str, folder: Path, *, dtype: str = "f32", compress: str | None = None, **changes: Any) -> Any:
    """Export a family, `changes` made to its tiny config, and hold it to what every family is held to; returns the result."""
    save_tiny_model(family_model(family, changes) if changes else build_tiny_model(family), folder / "model")
    result = export_llm(
        str(folder / "model"),
        folder / "export",
        dtype=dtype,
        compress=compress,
        decode_steps=DECODE_STEPS,
        require_tokenizer=False,
        archive="dir",
    )
    report = result.validation
    assert report is not None and report.passed
    assert [check.name for check in report.checks] == ["prefill", "chunked prefill", "decode", "greedy"]
    if dtype == "f32":
        for check in report.checks:
            assert check.max_abs_error <= MAX_ABS_ERROR, check.name
            assert check.same_top1 == len(check.steps), check.name
    assert max(step.scale for check in report.checks for step in check.steps) > 1.5  # worth comparing
    if result.manifest["model"].get("sliding_window") == WINDOW:
        assert PROMPT + DECODE_STEPS >= 3 * WINDOW
    return result


def family_model(family: str, changes: dict[str, Any]) -> Any:
    """Return a tiny model of a family, with changes made to its config."""
    with mock.patch.dict(overrides.OVERRIDES, {family: {**overrides.OVERRIDES.get(family, {}), **changes}}):
        return build_tiny_model(family)


def graph_text(result: Any) -> str:
    """Return the text of an export's graph."""
    return (Path(result.archive) / "graph.nnef").read_text(encoding="utf-8")

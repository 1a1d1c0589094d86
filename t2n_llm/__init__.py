"""Hugging Face causal language models to tract: export, validate, generate.

`export_llm` is the Python API, `t2n-llm` the command. Heavy imports are deferred until they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from generic_export.earlier_paths import keep_importable

if TYPE_CHECKING:
    from t2n_llm.export.pipeline import ExportResult, export_llm

__all__ = ["ExportResult", "export_llm"]


keep_importable(
    {
        "t2n_llm.benchmark": "t2n_llm.bench.benchmark",
        "t2n_llm.diagnosis": "t2n_llm.debug.diagnosis",
        "t2n_llm.inspection": "t2n_llm.inspect.inspection",
        "t2n_llm.located": "t2n_llm.export.archive_lookup",
        "t2n_llm.options": "t2n_llm.export.options",
        "t2n_llm.explain": "t2n_llm.debug",
        "t2n_llm.explain.diagnosis": "t2n_llm.debug.diagnosis",
        "t2n_llm.measure": "t2n_llm.runtime",
        "t2n_llm.measure.benchmark": "t2n_llm.bench.benchmark",
        "t2n_llm.measure.generate": "t2n_llm.runtime.generate",
        "t2n_llm.measure.inspection": "t2n_llm.inspect.inspection",
    }
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        from t2n_llm.export import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 't2n_llm' has no attribute {name!r}")

"""Hugging Face causal language models to tract: export, validate, generate.

`from t2n_llm import export_llm` is the Python door; `t2n-llm` is the command. Heavy imports wait until they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t2n_llm.export.pipeline import ExportResult, export_llm

__all__ = ["ExportResult", "export_llm"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from t2n_llm.export import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 't2n_llm' has no attribute {name!r}")

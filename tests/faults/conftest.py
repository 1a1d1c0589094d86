"""The models of the language model tests, to be damaged here."""

from __future__ import annotations

from tests.t2n_llm.conftest import captured_once, captures, large_model, model, parent, tiny_export, tiny_llama

__all__ = ["captured_once", "captures", "large_model", "model", "parent", "tiny_export", "tiny_llama"]

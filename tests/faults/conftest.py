"""The models of the language model tests, to be damaged here; a graph that was captured once is not captured again."""

from __future__ import annotations

from typing import Any

import pytest

from t2n_llm.tasks import text_generation
from tests.t2n_llm.conftest import large_model, model, parent, tiny_export, tiny_llama

__all__ = ["large_model", "model", "parent", "tiny_export", "tiny_llama"]


@pytest.fixture(scope="session")
def captures() -> dict[Any, Any]:
    """What was captured so far."""
    return {}


@pytest.fixture(autouse=True)
def captured_once(captures: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about what happens around the graph: the same config and options give the one that is there."""
    capture = text_generation.build_graph

    def build_graph(config: Any, options: Any, *, ranges: Any = None, **further: Any) -> Any:
        key = config.to_json_string(), options, tuple(further.items())
        if ranges is not None or key not in captures:
            captures[key] = capture(config, options, ranges=ranges, **further)
        return captures[key]

    monkeypatch.setattr(text_generation, "build_graph", build_graph)

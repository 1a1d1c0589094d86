"""The models of the language model tests, to be damaged here; a graph that was captured once is not captured again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from t2n_llm.tasks import text_generation
from tests.t2n_llm.conftest import large_model, model, parent, tiny_export, tiny_llama

__all__ = ["large_model", "model", "parent", "tiny_export", "tiny_llama"]


@pytest.fixture(scope="session", autouse=True)
def captured_once() -> Iterator[None]:
    """These tests are about what happens around the graph: the same config and options give the one that is there."""
    capture, made = text_generation.build_graph, {}

    def build_graph(config: Any, options: Any, **further: Any) -> Any:
        key = config.to_json_string(), options, tuple(further.items())
        if key not in made:
            made[key] = capture(config, options, **further)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_generation, "build_graph", build_graph)
        yield

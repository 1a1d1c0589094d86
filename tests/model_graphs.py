"""Graphs of causal language models without weights, up to the document that is written."""

from __future__ import annotations

from typing import Any

from t2n_llm.graph.causal_lm import build_graph
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.storage import finish_model
from t2n_llm.model_graph import ModelGraph


def model_graph(config: Any, options: GraphOptions | None = None, *, name: str = "example", **more: Any) -> ModelGraph:
    """Return the finished graph of a config."""
    options = options or GraphOptions()
    return finish_model(build_graph(config, options, name=name, **more), options)

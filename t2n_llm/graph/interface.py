"""What `export.json` says of graphs: inputs, outputs, states, and the model they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from generic_export.assertions import enforced_relations
from generic_export.nnef.graph import NnefGraph, NnefVariable
from kvcache.states.tensors import StateTensor


def interface(graph: NnefGraph, states: Sequence[StateTensor], dtype: str) -> dict[str, Any]:
    """Return what `export.json` says of a graph's inputs and outputs.

    Args:
        graph: as written.
        states: which of them are states that are fed back.
        dtype: of weights and caches; logits may be wider, see `GraphOptions.computes_in`.
    """
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "symbols": list(graph.symbols),
        "size_constraints": list(enforced_relations(graph.assertions)),
        "states": [asdict(state) for state in states],
        "dtype": dtype,
    }


def text_model(config: Any, variables: Iterable[NnefVariable]) -> dict[str, Any]:
    """Return what `export.json` says of a language model, or of the text part of another one.

    Args:
        config: transformers config.
        variables: everything that is stored.
    """
    text_config = config.get_text_config(decoder=True)
    return {
        "vocab_size": text_config.vocab_size,
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
        "sliding_window": sliding_window_of(text_config),
        "parameters": sum(variable.values for variable in variables),
    }


def sliding_window_of(config: Any) -> int | None:
    """Return how far back the layers of a text config look; None where they look at everything, or differ in it."""
    try:
        return getattr(config, "sliding_window", None)
    except Exception:  # transformers refuses to give one value for what differs by layer
        return None


def recorded_states(manifest: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """Return the states of the graph that a manifest describes; older ones call them caches.

    Raises:
        ArchiveError: a record is not complete.
    """
    graph = manifest["graph"]
    return tuple(StateTensor.from_record(record) for record in graph.get("states", ()))

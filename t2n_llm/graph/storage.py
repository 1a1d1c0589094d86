"""The dtypes in which a document reads weights and keeps states: f16 under f32 activations, caches whole, or held by the engine.

In: a translated `ModelGraph`, in the dtype of the computation. Out: the same, its document and states as the archive has them.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from generic_export.nnef.half_storage import store_in_half
from kvcache.states.engine_state import engine_held
from kvcache.states.half_states import give_and_take_half, keep_states_in_half
from kvcache.states.state_views import keep_states_whole
from t2n_llm.graph.capture import translate_model
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph


def finish_model(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Translate a captured graph and choose its storage, for options that need no measurement.

    Raises:
        TranslationError: an operator has no NNEF form; the message names its module.
    """
    return choose_storage(translate_model(graph, options), options)


def choose_storage(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Return a translated graph that reads weights and states in the dtypes of the options.

    Args:
        graph: translated, in the element type of `options.torch_dtype`.
        options: `dtype` of weights, `cache_dtype` of keys and values, `keep_f32` for parameters that stay in f32, and whether the
            engine keeps the states.
    """
    graph = _with_half_storage(graph, options) if options.mixed and graph.from_checkpoint else graph
    graph = replace(graph, captured=None)  # nothing reads it from here on, and it takes memory
    if not graph.states:
        return graph
    document = keep_states_whole(graph.document)
    if not options.engine_keeps_cache:
        return replace(graph, nnef=document)
    return replace(
        graph, nnef=engine_held(document, graph.states, options.kv_bits), states=(), engine_states=graph.states
    )


def _with_half_storage(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Store matrices in f16, and keys and values too unless the options say f32."""
    names = (name for name, _ in graph.network.named_parameters(remove_duplicate=False))
    halved = {name for name in names if not any(fnmatchcase(name, pattern) for pattern in options.keep_f32)}
    document, states = store_in_half(graph.document, halved), graph.states
    if not options.half_cache:
        return replace(graph, nnef=document)
    document, states = keep_states_in_half(document, states, by_products=options.rounds_by_products)
    if graph.handed:
        given = [name for name in graph.output_names if name in graph.handed]
        taken = [name for name in graph.inputs if name in graph.handed]
        shapes = graph.handed if options.rounds_by_products else None
        document = give_and_take_half(document, taken, given, shapes)
    return replace(graph, nnef=document, states=states)


__all__ = ["choose_storage", "finish_model"]

"""From a config to the finished NNEF document of a causal language model, with no weight in the process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from generic_export.nnef.graph import NnefGraph
from kvcache import explicit_attention, explicit_experts
from kvcache.states.engine_state import engine_held
from kvcache.states.state_views import keep_states_whole
from t2n_llm.graph.capture import document_of
from t2n_llm.graph.mixed import as_stored
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import RangeRequest
from t2n_llm.graph.skeleton import WRAPPER_ATTRIBUTE, Skeleton, build_skeleton


def build_graph(
    config: Any,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    ranges: RangeRequest | None = None,
) -> tuple[Skeleton, NnefGraph]:
    """Capture and translate the model of a config.

    Args:
        config: transformers config.
        options: element type, numerics and interface.
        name: source model, recorded in the document.
        revision: its commit, recorded too.
        trust_remote_code: allow code that comes with the model.
        ranges: has f16 activations measured on the weights, and made to fit; None leaves them as they are.

    Returns:
        The skeleton (shapes, states, values that the model computes itself) and the document.

    Raises:
        UnknownArchitectureError, CaptureError, TranslationError: the model cannot be expressed; the message says where.
        NumericRangeError: f16 does not hold its activations.
    """
    with explicit_attention() as attention, explicit_experts() as experts:
        skeleton = build_skeleton(
            config, options, attention=attention, experts=experts, trust_remote_code=trust_remote_code
        )
        document = document_of(
            skeleton.module,
            dict(zip(skeleton.input_names, skeleton.example_inputs(), strict=True)),
            skeleton.output_names,
            options.target(skeleton.dynamic_axes, skeleton.network, revision),
            prefix=f"{WRAPPER_ATTRIBUTE}.",
            graph_name=str(skeleton.config.model_type),
            source_name=name,
            fit=partial(ranges.fit, skeleton, skeleton.inputs_of(ranges.tokens)) if ranges is not None else None,
        )
    graph, states = as_stored(document.graph, skeleton.network, skeleton.states, options)
    buffers = {**skeleton.buffers, **document.constants}
    skeleton = replace(skeleton, buffers=buffers, states=states, ranges=document.ranges)
    graph = keep_states_whole(graph)
    if not options.engine_keeps_cache:
        return skeleton, graph
    held = engine_held(graph, skeleton.states, options.kv_bits)
    return replace(skeleton, states=(), engine_states=skeleton.states), held

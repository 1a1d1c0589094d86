"""One of several graphs that are made of the same weightless network: captured, translated, its states whole.

In: a `NetworkPart`. Out: a `BuiltPart`, the part with everything that a checkpoint does not hold, and its document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.request import DynamicAxes
from kvcache.engine_state import engine_held
from kvcache.half_states import give_and_take_half
from kvcache.state_views import keep_states_whole
from kvcache.states import StateTensor
from t2n_llm.graph.capture import document_of
from t2n_llm.graph.mixed import as_stored
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import Ranges

WRAPPER_ATTRIBUTE = "network"
"""Where the module of a part has the transformers model: parameters bear the model's own names in the graph."""


@dataclass(frozen=True)
class NetworkPart:
    """One of the graphs before its capture.

    Attributes:
        role: what its archive is called.
        module: what is captured; its attribute `network` is the transformers model.
        network: that model.
        buffers, tied, dtype: see `Weightless`.
        inputs: example inputs by name.
        output_names: of the graph.
        dynamic_axes: of the inputs.
        states: what a decoder is fed back.
        handed: keys and values that one part gives and another one takes, by name; they have the element type of caches.
        engine_states: what the engine keeps by itself.
        ranges: what was measured of its f16 tensors; None where nobody looked.
    """

    role: str
    module: nn.Module
    network: nn.Module
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    dtype: torch.dtype
    inputs: Mapping[str, torch.Tensor]
    output_names: tuple[str, ...]
    dynamic_axes: DynamicAxes
    states: tuple[StateTensor, ...] = ()
    handed: tuple[str, ...] = ()
    engine_states: tuple[StateTensor, ...] = ()
    ranges: Ranges | None = None


@dataclass(frozen=True)
class BuiltPart:
    """A part and its finished document."""

    part: NetworkPart
    graph: NnefGraph


def build_part(part: NetworkPart, options: GraphOptions, name: str, revision: str | None) -> BuiltPart:
    """Capture and translate a part.

    Args:
        part: which.
        options: element type and numerics.
        name, revision: source model, recorded in the document.

    Raises:
        CaptureError, TranslationError: the part cannot be expressed; the message says where.
    """
    document = document_of(
        part.module,
        part.inputs,
        part.output_names,
        options.target(part.dynamic_axes, part.network, revision, cached=bool(part.states), role=part.role),
        prefix=f"{WRAPPER_ATTRIBUTE}.",
        graph_name=part.role,
        source_name=name,
    )
    stored, states = as_stored(document.graph, part.network, part.states, options)
    if options.half_cache and part.handed:
        given = [name for name in part.output_names if name in part.handed]
        stored = give_and_take_half(stored, [name for name in part.inputs if name in part.handed], given)
    graph = keep_states_whole(stored)
    part = replace(part, buffers={**part.buffers, **document.constants}, states=states)
    if not (states and options.engine_keeps_cache):
        return BuiltPart(part, graph)
    return BuiltPart(replace(part, states=(), engine_states=states), engine_held(graph, states, options.kv_bits))

"""Several graphs that are made of the same weightless network: captured, translated, their states whole.

In: `NetworkPart`s. Out: a `BuiltPart` each, the part with everything that a checkpoint does not hold, and its document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.request import DynamicAxes
from kvcache.states.engine_state import engine_held
from kvcache.states.half_states import give_and_take_half
from kvcache.states.state_views import keep_states_whole
from kvcache.states.tensors import StateTensor
from t2n_llm.graph.capture import document_of
from t2n_llm.graph.mixed import as_stored
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import Fit, RangeRequest, Ranges

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


Typical = Callable[[NetworkPart, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Gives the inputs of a part by name, of what the parts before it gave: typical ones, with values."""


def build_parts(
    parts: Sequence[NetworkPart],
    options: GraphOptions,
    name: str,
    revision: str | None,
    ranges: RangeRequest | None,
    typical: Typical,
) -> dict[str, BuiltPart]:
    """Capture and translate parts in the order in which they run, by role.

    Args:
        parts: of one model.
        options: element type and numerics.
        name, revision: source model, recorded in the documents.
        ranges: has f16 activations measured on the weights, and made to fit; None leaves them as they are.
        typical: what each part is measured on; one that lacks an input then is not measured.

    Raises:
        CaptureError, TranslationError: a part cannot be expressed; the message says where.
        NumericRangeError: f16 does not hold its activations.
    """
    built: dict[str, BuiltPart] = {}
    shapes = {name: tuple(part.inputs[name].shape) for part in parts for name in part.handed if name in part.inputs}
    given: dict[str, torch.Tensor] = {}
    for part in parts:
        fit = None
        inputs = typical(part, given) if ranges is not None else {}
        if ranges is not None and set(part.inputs) <= set(inputs):
            fit = partial(ranges.fit, part, [inputs[name] for name in part.inputs], hands_on=part is not parts[-1])
        built[part.role], gave = _built(part, options, name, revision, fit, shapes)
        given |= gave
    return built


def _built(
    part: NetworkPart,
    options: GraphOptions,
    name: str,
    revision: str | None,
    fit: Fit | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[BuiltPart, Mapping[str, torch.Tensor]]:
    """Capture and translate a part; return what it gave when it was measured, too.

    `shapes` are those of what parts hand to each other; their last sizes are fixed.
    """
    document = document_of(
        part.module,
        part.inputs,
        part.output_names,
        options.target(part.dynamic_axes, part.network, revision, cached=bool(part.states), role=part.role),
        prefix=f"{WRAPPER_ATTRIBUTE}.",
        graph_name=part.role,
        source_name=name,
        fit=fit,
    )
    stored, states = as_stored(document.graph, part.network, part.states, options)
    if options.half_cache and part.handed:
        given = [name for name in part.output_names if name in part.handed]
        taken = [name for name in part.inputs if name in part.handed]
        stored = give_and_take_half(stored, taken, given, shapes if options.rounds_by_products else None)
    graph = keep_states_whole(stored)
    buffers = {**part.buffers, **document.constants}
    part = replace(part, buffers=buffers, states=states, ranges=document.ranges)
    if states and options.engine_keeps_cache:
        part, graph = replace(part, states=(), engine_states=states), engine_held(graph, states, options.kv_bits)
    return BuiltPart(part, graph), document.gave

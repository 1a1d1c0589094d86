"""f16 weights and caches under f32 activations: which tensors of a model, by its own names.

In: a document that was captured in f32, and the choices of the export. Out: the document as those choices want it stored.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import store_in_half
from kvcache.states.half_states import keep_states_in_half
from kvcache.states.tensors import StateTensor
from t2n_llm.graph.options import GraphOptions


def as_stored(
    graph: NnefGraph, network: nn.Module, states: tuple[StateTensor, ...], options: GraphOptions
) -> tuple[NnefGraph, tuple[StateTensor, ...]]:
    """Return a document and its states with weights and caches in the element types that were asked for.

    Args:
        graph: in the element type of `options.torch_dtype`.
        network: its parameters bear the names of the graph's variables.
        states: of the graph.
        options: where they mix element types, matrices, keys and values become f16, except what `keep_f32` names.
    """
    if not options.mixed:
        return graph, states
    names = (name for name, _ in network.named_parameters(remove_duplicate=False))
    halved = {name for name in names if not any(fnmatchcase(name, pattern) for pattern in options.keep_f32)}
    stored = store_in_half(graph, halved)
    if not options.half_cache:
        return stored, states
    return keep_states_in_half(stored, states, by_products=options.rounds_by_products)

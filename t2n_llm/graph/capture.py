"""From a config to a translated document, for every task: the network without weights, its capture, its translation.

In: a `ModelGraph` with a module. Out: the same with `captured`, then with `nnef`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from generic_export.assertions import enforced, warn_of_conditions
from generic_export.capture import capture
from generic_export.documents import producer_properties, translate_graph
from generic_export.errors import GraphError
from generic_export.torch_graph.fusion import Fusion
from generic_export.torch_graph.ir import SizeCondition, TorchModuleIRGraph
from generic_export.translate.translate import TranslationOptions
from kvcache import fuse_rotary_embedding
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.set_order import sorted_sets
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import ModelKind, instantiate, widen

# How every export of this package captures: whoever explains one (coverage, a diagnosis) captures with the same.
FUSIONS: tuple[Fusion, ...] = (fuse_rotary_embedding,)
WRAPPER_ATTRIBUTE = (
    "network"  # of a captured module: the transformers model, whose names the parameters have in the graph
)
TORCHSCRIPT = False  # a network without values has nothing to compare a trace with


def weightless_network(
    kind: ModelKind, config: Any, options: GraphOptions, attention: str, experts: str, trust_remote_code: bool
) -> Any:
    """Return transformers' model of a config on the meta device, the parameters that stay in f32 widened.

    Args:
        kind: which of transformers' classes for the config.
        config: a transformers config; it is not modified.
        options: element type, and which parameters stay in f32.
        attention, experts: names of implementations (see `kvcache.explicit_attention`, `explicit_experts`).
        trust_remote_code: allow code that comes with the model.

    Raises:
        UnknownArchitectureError: transformers has no such class for the config.
    """
    network = instantiate(kind, config, options.torch_dtype, attention, experts, trust_remote_code)
    for pattern in options.keep_f32:
        widen(network, pattern, options.torch_dtype)
    return network


def capture_model(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Capture the module of a graph on the meta device; its buffers then include the constants of the capture.

    Raises:
        CaptureError: the module cannot be captured; the message names the line.
    """
    with sorted_sets(graph.module):
        captured = capture(
            graph.module,
            tuple(graph.inputs.values()),
            options.target(graph),
            tuple(graph.inputs),
            graph.output_names,
            fusions=FUSIONS,
            strip_prefix=f"{WRAPPER_ATTRIBUTE}.",
            torchscript=TORCHSCRIPT,
        )
    warn_of_conditions(graph.source_name, _limits(captured))
    return replace(graph, captured=captured, buffers={**graph.buffers, **captured.constants})


def translate_model(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Translate a captured graph; the dtypes of weights and states are still those of the computation.

    Raises:
        GraphError: the graph is not captured.
        TranslationError: an operator has no NNEF form; the message names its module.
    """
    captured = graph.captured
    if captured is None:
        raise GraphError(f"graph {graph.role!r} is not captured.", "Call capture_model first.")
    translation = TranslationOptions(
        graph_name=graph.graph_name,
        assertions=enforced((), _limits(captured)),
        properties=tuple(producer_properties(source_model=graph.source_name).items()),
    )
    document = translate_graph(captured, options.target(graph), translation, graph.module)
    variables = (replace(each, factor=graph.factors.get(each.parameter, 1.0)) for each in document.variables)
    return replace(graph, nnef=replace(document, variables=tuple(variables)) if graph.factors else document)


def _limits(captured: TorchModuleIRGraph) -> list[SizeCondition]:
    return [condition for condition in captured.conditions if condition.source]


__all__ = ["FUSIONS", "TORCHSCRIPT", "WRAPPER_ATTRIBUTE", "capture_model", "translate_model", "weightless_network"]

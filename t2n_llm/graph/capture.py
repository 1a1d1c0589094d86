"""What every task does between a config and a document: a network without weights, and its module captured and translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from generic_export.assertions import enforced, warn_of_conditions
from generic_export.capture import capture
from generic_export.documents import producer_properties, translate_graph
from generic_export.inference_target import TractNNEF
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.fusion import Fusion
from generic_export.translate.translate import TranslationOptions
from kvcache import fuse_rotary_embedding
from t2n_llm.graph.options import GraphOptions
from t2n_llm.graph.ranges import Fit, Ranges, with_factors
from t2n_llm.graph.set_order import sorted_sets
from t2n_llm.source.empty_model import ModelKind, instantiate, widen

# How every export of this package captures: whoever explains one (coverage, a diagnosis) captures with the same.
FUSIONS: tuple[Fusion, ...] = (fuse_rotary_embedding,)
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


@dataclass(frozen=True)
class Document:
    """A module translated.

    Attributes:
        graph: the document.
        constants: the values that the capture computed itself, by name.
        ranges: what was measured of its f16 tensors; None where nobody looked.
        gave: its outputs then, where another graph takes them.
    """

    graph: NnefGraph
    constants: Mapping[str, torch.Tensor]
    ranges: Ranges | None = None
    gave: Mapping[str, torch.Tensor] = field(default_factory=dict)


def document_of(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    output_names: Sequence[str],
    target: TractNNEF,
    *,
    prefix: str,
    graph_name: str,
    source_name: str,
    fit: Fit | None = None,
) -> Document:
    """Capture and translate a module.

    Args:
        module: on the meta device.
        inputs: by name; the sizes are only hints and never reach the graph.
        output_names: of the graph.
        target: numerics, and which axes are symbols.
        prefix: what the names of parameters begin with, inside a wrapper.
        graph_name: of the document.
        source_name: the model, recorded in the document.
        fit: makes what was captured fit the range of f16; None leaves it as it is.

    Raises:
        CaptureError, TranslationError: the module cannot be expressed; the message says where.
        NumericRangeError: f16 does not hold its activations.
    """
    with sorted_sets(module):
        captured = capture(
            module,
            tuple(inputs.values()),
            target,
            tuple(inputs),
            tuple(output_names),
            fusions=FUSIONS,
            strip_prefix=prefix,
            torchscript=TORCHSCRIPT,
        )
    producer = tuple(producer_properties(source_model=source_name).items())
    limits = [each for each in captured.conditions if each.source]
    warn_of_conditions(source_name, limits)
    options = TranslationOptions(graph_name=graph_name, assertions=enforced((), limits), properties=producer)
    if fit is None:
        return Document(translate_graph(captured, target, options, module), captured.constants)
    fitted = fit(captured)
    graph = with_factors(translate_graph(fitted.graph, target, options, module), fitted.factors)
    return Document(graph, captured.constants, fitted.ranges, fitted.gave)

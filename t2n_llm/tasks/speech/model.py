"""The graphs of a speech model, captured without weights.

In: the family of a config. Out: a `ModelGraph` for each part of its family, in the order in which they run.
"""

from __future__ import annotations

from typing import Any

import torch

from generic_export.torch_graph.capture.known_buffers import MOST_VALUES, forward_decided_by
from kvcache import explicit_attention, explicit_experts
from t2n_llm.graph.capture import WRAPPER_ATTRIBUTE, capture_model, weightless_network
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.source.empty_model import computed_parameters, take_buffers, tied_names
from t2n_llm.tasks.speech.family import SpeechFamily, SpeechPart
from t2n_llm.tasks.speech.plan import CODE, CODES

_HINTS = {"S": 9, "F": 30, "P": 7, "V": 6}  # of symbols, which never reach the graph
_INTEGERS = ("_id", "_ids", CODE, CODES)


def build_speech(
    family: SpeechFamily,
    options: GraphOptions,
    *,
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[ModelGraph, ...]:
    """Build and capture the parts of a speech model.

    Args:
        family: of the model, for its config.
        options: element type and numerics.
        name, revision: source model, recorded in the documents.
        trust_remote_code: allow code that comes with the model.

    Raises:
        CaptureError: the model cannot be captured; the message says where.
    """
    with explicit_attention() as attention, explicit_experts() as experts:

        def build(implementation: str) -> tuple[ModelGraph, ...]:
            network = weightless_network(
                family.kind, family.config, options, implementation, experts, trust_remote_code
            )
            parts = family.parts(network)
            networks = dict.fromkeys(part.module.network for part in parts)
            values = {each: _values(each) for each in networks}
            return tuple(_graph(part, *values[part.module.network], name, revision) for part in parts)

        return tuple(_captured(graph, options) for graph in attention.first_that_runs(build))


def _captured(graph: ModelGraph, options: GraphOptions) -> ModelGraph:
    """Capture a part; its code may decide by small buffers that no checkpoint has, such as the padding of a codec's layers."""
    stored = graph.network.state_dict().keys()
    known = {
        f"{WRAPPER_ATTRIBUTE}.{name}": value
        for name, value in graph.buffers.items()
        if name not in stored and value.numel() <= MOST_VALUES
    }
    with forward_decided_by(graph.module, known):
        return capture_model(graph, options)


def _values(network: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the values that a network computes itself, and its tied parameters."""
    return computed_parameters(network) | take_buffers(network), tied_names(network)


def _graph(
    part: SpeechPart, buffers: dict[str, torch.Tensor], tied: dict[str, str], name: str, revision: str | None
) -> ModelGraph:
    network: Any = part.module.network
    return ModelGraph(
        role=part.role,
        network=network,
        module=part.module.eval(),
        buffers=buffers,
        tied=tied,
        inputs={each: _example(each, shape) for each, shape in part.inputs.items()},
        output_names=part.outputs,
        dynamic_axes={
            each: {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
            for each, shape in part.inputs.items()
        },
        source_name=name,
        revision=revision,
        graph_name=part.role,
        properties={"role": part.role},
        states=part.states,
        handed=part.handed,
        checkpoint=part.vocoder.checkpoint if part.vocoder is not None else None,
    )


def _example(name: str, shape: tuple[int | str, ...]) -> torch.Tensor:
    sizes = [_HINTS[size] if isinstance(size, str) else size for size in shape]
    return torch.zeros(sizes, dtype=torch.int64 if name.endswith(_INTEGERS) else torch.float32, device="meta")


__all__ = ["build_speech"]

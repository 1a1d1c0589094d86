"""`ModelGraph`: one archive of a model, from the weightless module to the document and its tensors. Every task uses this record.

In: what a task builds from a config. Out: the same record, with one more field after each stage of an export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from generic_export.errors import GraphError
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.precision.scale_groups import F16_LIMIT, HEADROOM, ScaleGroup
from generic_export.torch_graph.request import DynamicAxes
from generic_export.weights.checkpoint import Checkpoint
from generic_export.weights.half import CastReport
from generic_export.weights.source import TensorSource
from kvcache.states.tensors import StateTensor
from t2n_llm.source.adapter_merge import Update
from t2n_llm.weights.names import ParameterSources

MODEL_ROLE = "model"
"""Role of the archive of a task that has a single one."""


@dataclass(frozen=True)
class Ranges:
    """The measured magnitudes of a graph's f16 tensors.

    Attributes:
        tokens: number of tokens that the model ran on.
        largest: magnitude by module, the largest ones.
        groups: tensors of one scale that overflow f16 or come near it, and how they are stored.
    """

    tokens: int
    largest: Mapping[str, float]
    groups: tuple[ScaleGroup, ...]

    def recorded(self) -> dict[str, Any]:
        """Return the entry of `export.json`."""
        return {
            "tokens": self.tokens,
            "limit": F16_LIMIT,
            "headroom": HEADROOM,
            "max_abs": dict(self.largest),
            "rescaled": [
                {
                    "module": group.where,
                    "max_abs": group.largest,
                    "tensors": len(group.tensors),
                    "factor": 2.0**group.exponent,
                    "in_f32": group.in_f32,
                    "reason": group.obstacle,
                }
                for group in self.groups
            ],
        }


@dataclass(frozen=True)
class ModelGraph:
    """One archive of a model. The first group of fields is set by the task, the others by the stages of an export.

    Attributes:
        role: name of the archive.
        network: the transformers model on the meta device; its parameters have the names of the document's variables.
        module: what is captured; its attribute `network` is that model.
        buffers: values of buffers that the model computes itself, by qualified name; a capture adds its constants.
        tied: alias -> name of the parameter that it shares.
        inputs: example inputs by name, on the meta device; their sizes are hints.
        output_names: of the document, in order.
        dynamic_axes: symbols of the inputs.
        source_name, revision: the source model, recorded in the document.
        graph_name: of the document.
        properties: recorded in the document.
        states: tensors that outputs feed back to inputs.
        engine_states: tensors that the engine keeps between calls.
        handed: keys and values that one archive passes to another, name -> example shape; stored like caches.
        from_checkpoint: whether the tensors are weights; a front end has constants only.
        checkpoint: the files of the weights, where these are not the source's own (a vocoder).

        captured: set by `capture_model`.
        parameters: where the values of each parameter are; set by `with_parameters`.
        ranges, factors: set by `fit_ranges`; `factors` multiply the values of parameters.
        nnef: set by `translate_model`, then replaced by the stages that decide the storage.
        sources: values of each variable as stored, by label; set by `with_sources`.
    """

    role: str
    network: nn.Module
    module: nn.Module
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    inputs: Mapping[str, torch.Tensor]
    output_names: tuple[str, ...]
    dynamic_axes: DynamicAxes
    source_name: str
    revision: str | None
    graph_name: str
    properties: Mapping[str, str] = field(default_factory=dict)
    states: tuple[StateTensor, ...] = ()
    engine_states: tuple[StateTensor, ...] = ()
    handed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    from_checkpoint: bool = True
    checkpoint: Checkpoint | None = None

    captured: TorchModuleIRGraph | None = None
    parameters: ParameterSources | None = None
    ranges: Ranges | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    nnef: NnefGraph | None = None
    sources: Mapping[str, TensorSource] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.network.config

    @property
    def document(self) -> NnefGraph:
        """The NNEF document.

        Raises:
            GraphError: the graph is not translated yet.
        """
        if self.nnef is None:
            raise GraphError(f"graph {self.role!r} has no document.", "Call translate_model first.")
        return self.nnef

    @property
    def stored_values(self) -> int:
        """Number of values in all variables of the document."""
        return sum(prod(variable.shape) for variable in self.document.variables)

    @property
    def unused(self) -> tuple[str, ...]:
        """Checkpoint tensors that no parameter of the model is made of."""
        return self.parameters.unused if self.parameters is not None else ()

    def with_parameters(
        self, checkpoint: Checkpoint | None = None, updates: Mapping[str, Update] | None = None
    ) -> ModelGraph:
        """Return the graph with the place of each parameter in a checkpoint; no weight is read.

        Args:
            checkpoint: the opened files; None for a graph that has constants only.
            updates: what an adapter changes, by parameter.

        Raises:
            WeightError: tensors that belong together do not fit together.
        """
        found = ParameterSources.of(self.network, self.tied, self.buffers, checkpoint, updates)
        return replace(self, parameters=found)

    def with_sources(self, report: CastReport) -> ModelGraph:
        """Return the graph with the values of each variable, cast to the dtype that the document reads.

        Args:
            report: filled while the values are streamed, see `CastReport`.

        Raises:
            GraphError: `with_parameters` was not called.
            MissingTensorError: the checkpoint lacks a parameter.
        """
        if self.parameters is None:
            raise GraphError(f"graph {self.role!r} has no parameters.", "Call with_parameters first.")
        return replace(self, sources=self.parameters.of_variables(self.document.variables, report))


def weighted(graphs: Sequence[ModelGraph]) -> list[ModelGraph]:
    """Return the graphs that hold weights, in order: all but a front end."""
    return [graph for graph in graphs if graph.from_checkpoint]


__all__ = ["MODEL_ROLE", "ModelGraph", "Ranges", "weighted"]

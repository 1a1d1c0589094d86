"""From a config to a translated document, for every task: the network without weights, its capture, its translation.

In: a `ModelGraph` with a module. Out: the same with `captured`, then with `nnef`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from generic_export.assertions import enforced, warn_of_conditions
from generic_export.capture import capture
from generic_export.documents import producer_properties, translate_graph
from generic_export.errors import GraphError
from generic_export.torch_graph.fusion import Fusion
from generic_export.torch_graph.ir import SizeCondition, TorchModuleIRGraph
from generic_export.translate.translate import TranslationOptions
from kvcache import fuse_rotary_embedding
from t2n_llm.graph.options import GraphOptions
from t2n_llm.model_graph import ModelGraph
from t2n_llm.reporter import Reporter
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


# --- progress of a capture ---------------------------------------------------------------------------


CAPTURING, TRANSLATING = "Capturing the graph", "Translating the graph"


@contextmanager
def report_captures(reporter: Reporter) -> Iterator[None]:
    """Report the stages of every capture in the block, and one step per layer."""
    reporter.stage(CAPTURING)
    told = _Layers(reporter)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(told.begins).remove)
        stack.callback(register_module_forward_hook(told.ended).remove)
        yield


class _Layers:
    """Counts the layers of the network that is captured."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._network: nn.Module | None = None
        self._parts: frozenset[int] = frozenset()
        self._left: set[int] = set()
        self._count = 0
        self._translates = False

    def begins(self, module: nn.Module, args: Any) -> None:
        """A module is called."""
        if not torch.compiler.is_exporting():
            return
        if id(module) not in self._parts or module is self._network:
            self._begin(module)
        if id(module) in self._left:
            self._left.remove(id(module))
            self._reporter.steps(self._count - len(self._left), self._count)

    def _begin(self, network: nn.Module) -> None:
        lists = [each for each in network.modules() if isinstance(each, nn.ModuleList)]
        layers = max(lists, key=len, default=nn.ModuleList())
        self._network, self._parts = network, frozenset(map(id, network.modules()))
        self._left, self._count = set(map(id, layers)), len(layers)
        if self._translates:  # the next archive, or this one at other sizes
            self._reporter.stage(CAPTURING)
        self._translates = False

    def ended(self, module: nn.Module, args: Any, result: Any) -> None:
        """A module has returned."""
        if module is self._network and torch.compiler.is_exporting():
            self._translates = True
            self._reporter.stage(TRANSLATING)


# --- sets in sorted order ----------------------------------------------------------------------------


class _SetType(type):
    """Makes `isinstance(value, set)` true for every set where `SortedSet` stands for the built-in."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, set)


class SortedSet(set, metaclass=_SetType):
    """A set that yields names in sorted order, and elements that have no order as they come."""

    def __iter__(self) -> Iterator:
        elements = super().__iter__()
        try:
            return iter(sorted(elements))
        except TypeError:
            return super().__iter__()


_CALLED = frozenset({"transformers.masking_utils"})
"""Modules of transformers that iterate over sets, and that models call."""


@contextmanager
def sorted_sets(network: nn.Module) -> Iterator[None]:
    """Let the code of a network iterate over sets in sorted order.

    Replaces `set` in the Python modules that define the network's classes (PyTorch's own excepted), in transformers' modules that
    these call, and sets that are attributes of its modules. Sets that are written with braces are not replaced.

    Args:
        network: not changed when the block ends.
    """
    parts = list(network.modules())
    names = {type(part).__module__ for part in parts if not type(part).__module__.startswith("torch.")}
    with ExitStack() as stack:
        for name in names | _CALLED.intersection(sys.modules):
            stack.enter_context(mock.patch.object(sys.modules[name], "set", SortedSet, create=True))
        for part in parts:
            for name, value in list(vars(part).items()):
                if type(value) is set and not name.startswith("_"):
                    stack.enter_context(mock.patch.dict(vars(part), {name: SortedSet(value)}))
        yield


__all__ = [
    "CAPTURING",
    "FUSIONS",
    "TORCHSCRIPT",
    "TRANSLATING",
    "WRAPPER_ATTRIBUTE",
    "SortedSet",
    "capture_model",
    "report_captures",
    "sorted_sets",
    "translate_model",
    "weightless_network",
]

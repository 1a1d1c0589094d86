"""A module with example arguments and the names and symbols of its boundary: what a plan is held against.

In: modules as their authors have them. Out: `Signature`, the boundary as it is, each tensor with name, type and axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.errors import OptionError
from generic_export.inference_target.example import call_example
from generic_export.remodel.plan import AxisName
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.request import DynamicAxes, DynamicSize, symbol_name


@dataclass(frozen=True)
class Subgraph:
    """One module of a model, as it would be exported without a plan.

    Attributes:
        name: of the archive, and of its entry in a plan.
        module: the module; it is never modified.
        args: example positional arguments.
        kwargs: example keyword arguments.
        input_names: a name per input tensor; None takes those of the forward, dotted (`states.0`).
        output_names: a name per output tensor; None takes `output`, `output_0`, ... or the result's own.
        dynamic_axes: `{input name: {axis: symbol}}`.
        assertions: relations between symbols that hold.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: DynamicAxes = field(default_factory=dict)
    assertions: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedTensor:
    """An example tensor of a boundary.

    Attributes:
        name: its name.
        value: the tensor.
        dims: an axis each: its symbol, or its size where that is fixed.
    """

    name: str
    value: torch.Tensor
    dims: tuple[AxisName, ...]


@dataclass(frozen=True)
class Signature:
    """The boundary of a sub-graph, found by running it once on its example.

    Attributes:
        call: how the arguments are put together from tensors.
        inputs: every input tensor.
        outputs: every output tensor; their axes are sizes at the example.
        declared: what was said of a symbol's size, by a `torch.export.Dim` or a `DynamicSize`.
    """

    call: FlatCall
    inputs: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]
    declared: Mapping[str, DynamicSize]

    @staticmethod
    def of(subgraph: Subgraph) -> Signature:
        """Run a sub-graph on its example and note what goes in and out.

        Raises:
            OptionError: its names or dynamic axes do not fit the module.
            CaptureError: it returns something else than tensors.
        """
        with evaluation_mode(subgraph.module):
            answered = call_example(subgraph.module, subgraph.args, subgraph.kwargs)
        call = answered.call
        names = _names(subgraph, "input", subgraph.input_names, call.names)
        output_names = _names(subgraph, "output", subgraph.output_names, answered.output_names)
        unknown = next((name for name in subgraph.dynamic_axes if name not in names), None)
        if unknown is not None:
            raise OptionError(
                f"sub-graph {subgraph.name!r}: dynamic axes are declared for unknown input {unknown!r}.",
                f"Inputs: {', '.join(names)}.",
            )
        inputs = [
            NamedTensor(name, value, _dims(subgraph, name, value))
            for name, value in zip(names, call.tensors, strict=True)
        ]
        results = [
            NamedTensor(name, value, tuple(value.shape))
            for name, value in zip(output_names, answered.outputs, strict=True)
        ]
        return Signature(call, tuple(inputs), tuple(results), _declared(subgraph.dynamic_axes))


def _names(subgraph: Subgraph, kind: str, given: Sequence[str] | None, own: Sequence[str]) -> tuple[str, ...]:
    names = tuple(own if given is None else given)
    if len(names) != len(own):
        raise OptionError(
            f"sub-graph {subgraph.name!r} has {len(own)} {kind} tensors but {len(names)} {kind} names.",
            f"The tensors are: {', '.join(own)}.",
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"sub-graph {subgraph.name!r} has two {kind}s named {twice!r}.", "Use different names.")
    return names


def _dims(subgraph: Subgraph, name: str, value: torch.Tensor) -> tuple[AxisName, ...]:
    dims: list[AxisName] = list(value.shape)
    for axis, symbol in subgraph.dynamic_axes.get(name, {}).items():
        if not -value.ndim <= axis < value.ndim:
            raise OptionError(
                f"sub-graph {subgraph.name!r}: input {name!r} has {value.ndim} axes and no axis {axis}.",
                "Count axes from 0.",
            )
        dims[axis] = symbol_name(symbol)
    return tuple(dims)


def _declared(dynamic_axes: DynamicAxes) -> dict[str, DynamicSize]:
    given = [symbol for axes in dynamic_axes.values() for symbol in axes.values() if not isinstance(symbol, str)]
    return {
        symbol_name(said): said
        if isinstance(said, DynamicSize)
        else DynamicSize(symbol_name(said), min=_finite(said, "min"), max=_finite(said, "max"))
        for said in given
    }


def _finite(dim: object, bound: str) -> int | None:
    """Return a bound of a `Dim`; where it has none PyTorch keeps an infinity of its own there."""
    value = getattr(dim, bound)
    return value if isinstance(value, int) and value > 0 else None

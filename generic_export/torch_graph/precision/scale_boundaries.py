"""Where a stream that must be kept smaller enters or leaves a graph: what others hand over keeps its values.

In: a captured graph, and names of its inputs and outputs. Out: the graph in which each of those is one multiplication by one away
from what is computed with it, so that rescaling has a place to write a power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from generic_export.torch_graph.ir import FixedTensorList, TensorKind, TensorVariable, TorchModuleIRGraph, TorchOp

aten = torch.ops.aten


def name_inside(name: str) -> str:
    """Return the name of what stands for an input or an output inside the graph."""
    return f"{name}_inside"


def cut_off(graph: TorchModuleIRGraph, names: Collection[str]) -> TorchModuleIRGraph:
    """Return a graph that computes the same, in which nothing but a multiplication by one touches some inputs and outputs.

    Args:
        graph: as captured.
        names: of inputs that operators read, and of results that are outputs.
    """
    inputs = {each.name: each for each in graph.inputs if each.name in names}
    inside = {name: replace(each, name=name_inside(name), kind=TensorKind.RESULT) for name, each in inputs.items()}
    results = (out for op in graph.ops for out in op.outputs if out is not None and out.name in names)
    inside |= {each.name: replace(each, name=name_inside(each.name)) for each in results}
    return replace(graph, ops=tuple(_operators(graph, inputs, inside)))


def _operators(
    graph: TorchModuleIRGraph, inputs: Mapping[str, TensorVariable], inside: Mapping[str, TensorVariable]
) -> Iterator[TorchOp]:
    waiting = dict(inputs)
    for op in graph.ops:
        for tensor in op.tensor_inputs():
            if tensor.name in waiting:
                yield _times_one(op, waiting.pop(tensor.name), inside[tensor.name])
        made = tuple(inside.get(out.name, out) if out is not None else None for out in op.outputs)
        yield replace(with_tensors(op, inside), outputs=made)
        for out, within in zip(op.outputs, made, strict=True):
            if out is not None and within is not None and out is not within:
                yield _times_one(op, within, out)


def _times_one(near: TorchOp, given: TensorVariable, made: TensorVariable) -> TorchOp:
    return replace(near, target=aten.mul.Tensor, args=(given, 1.0), kwargs={}, outputs=(made,))


def with_tensors(op: TorchOp, swapped: Mapping[str, TensorVariable]) -> TorchOp:
    """Return an operator that reads other tensors in the place of some.

    Args:
        op: which.
        swapped: what is read instead, by the name of what was.
    """

    def swap(argument: Any) -> Any:
        if isinstance(argument, TensorVariable):
            return swapped.get(argument.name, argument)
        if isinstance(argument, FixedTensorList):
            return FixedTensorList(tuple(map(swap, argument.elements)))
        return tuple(map(swap, argument)) if isinstance(argument, tuple) else argument

    kwargs = {name: swap(argument) for name, argument in op.kwargs.items()}
    return replace(op, args=tuple(map(swap, op.args)), kwargs=kwargs)


__all__ = ["cut_off", "name_inside", "with_tensors"]

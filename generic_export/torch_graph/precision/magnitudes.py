"""How large the tensors of a captured graph become: what an f16 graph computes, computed in f32, where nothing overflows.

In: a captured graph, inputs and stored tensors. Out: the largest magnitude of each float, by name, and what the graph gives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from generic_export.torch_graph.capture.replay import Stored, replay
from generic_export.torch_graph.ir import FixedTensorList, TensorVariable, TorchModuleIRGraph, TorchOp

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Measured:
    """What one run of a graph in f32 showed; what PyTorch cannot compute from captured operators alone is missing.

    Attributes:
        largest: absolute value of each float input, parameter and result, by name.
        values: of the tensors that were asked for, by name.
    """

    largest: Mapping[str, float]
    values: Mapping[str, torch.Tensor]


def measured(
    graph: TorchModuleIRGraph, inputs: Sequence[torch.Tensor], stored: Stored, wanted: Collection[str] = ()
) -> Measured:
    """Run a graph in f32 and look at each float input, parameter and result.

    Args:
        graph: what was captured, in any float element type.
        inputs: one tensor per input of the graph, of any size that its symbols allow.
        stored: the parameters, buffers and constants.
        wanted: names of the tensors whose values are kept.
    """
    found: dict[str, float] = {}
    parameters = {variable.name for variable in graph.parameters}

    def watch(name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype.is_floating_point:
            found[name] = _largest(tensor)

    def widened(name: str) -> torch.Tensor | None:
        tensor = stored(name)
        if tensor is not None and name in parameters and name not in found:
            watch(name, tensor)
        return tensor if tensor is None else _wide(tensor)

    wide = [_wide(tensor) for tensor in inputs]
    for variable, tensor in zip(graph.inputs, wide, strict=True):
        watch(variable.name, tensor)
    values = replay(_in_f32(graph), wide, widened, wanted, watch)
    return Measured(found, values)


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; nan when there is one, which says that nothing is known of the others."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return math.nan if torch.isnan(low) else max(-float(low), float(high))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _in_f32(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Return the graph whose casts to narrow floats are casts to f32."""
    return replace(graph, ops=tuple(op_in_f32(op) for op in graph.ops))


def op_in_f32(op: TorchOp) -> TorchOp:
    """Return an operator whose arguments name f32 where they named a narrow float."""
    kwargs = {name: _argument_in_f32(argument) for name, argument in op.kwargs.items()}
    return replace(op, args=tuple(map(_argument_in_f32, op.args)), kwargs=kwargs)


def _argument_in_f32(argument: Any) -> Any:
    if isinstance(argument, TorchModuleIRGraph):  # a loop's body
        return _in_f32(argument)
    if isinstance(argument, TensorVariable | FixedTensorList):
        return argument
    if isinstance(argument, tuple):
        return tuple(map(_argument_in_f32, argument))
    return torch.float32 if isinstance(argument, torch.dtype) and argument in _NARROW else argument


__all__ = ["Measured", "measured", "op_in_f32"]

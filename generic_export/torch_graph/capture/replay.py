"""A captured graph run operator by operator in PyTorch, to look at what lies between its inputs and its outputs.

In: a `TorchModuleIRGraph`, real inputs and stored tensors. Out: the values of the tensors asked for, by name; those that
PyTorch cannot compute from a captured operator alone are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import nn

from generic_export.compat import pytree
from generic_export.errors import CaptureError
from generic_export.torch_graph.capture.leaf_modules import module_of, state_names
from generic_export.torch_graph.ir import FixedTensorList, TensorVariable, TorchModuleIRGraph, TorchOp
from generic_export.torch_graph.loops import SCAN

Stored = Callable[[str], torch.Tensor | None]
"""Gives a parameter, buffer or constant by its name."""

Watch = Callable[[str, torch.Tensor], None]
"""Is shown a result by its name."""

_UNIT = torch.ops.t2n.unit.default

log = logging.getLogger(__name__)


def replay(
    graph: TorchModuleIRGraph,
    inputs: Sequence[torch.Tensor],
    stored: Stored,
    wanted: Collection[str],
    watch: Watch | None = None,
) -> dict[str, torch.Tensor]:
    """Run a captured graph and return the tensors named in `wanted`, as far as they can be computed.

    Args:
        graph: what was captured, fusions included.
        inputs: one tensor per input of the graph, of any size that its symbols allow.
        stored: the parameters, buffers and constants.
        wanted: names of inputs and results to keep; everything else is freed after its last use.
        watch: shown each result, by name, as it is computed; those inside a loop's body are not.

    Raises:
        CaptureError: the inputs are not as many as the graph's.
    """
    if len(inputs) != len(graph.inputs):
        raise CaptureError(f"the captured graph takes {len(graph.inputs)} tensors, got {len(inputs)}.")
    known = {variable.name: tensor.detach().cpu() for variable, tensor in zip(graph.inputs, inputs, strict=True)}
    with torch.no_grad():
        return _run(graph, known, sizes_of(graph, inputs), stored, frozenset(wanted), watch)


def _run(
    graph: TorchModuleIRGraph,
    known: dict[str, torch.Tensor],
    sizes: Mapping[sympy.Symbol, int],
    stored: Stored,
    wanted: frozenset[str],
    watch: Watch | None = None,
) -> dict[str, torch.Tensor]:
    remaining = graph.use_counts()
    for op in graph.ops:
        results = _results(op, _Arguments(known, sizes, stored))
        for variable, result in zip(op.outputs, results, strict=True):
            if variable is not None and result is not None:
                known[variable.name] = result
                if watch is not None:
                    watch(variable.name, result)
        for tensor in op.tensor_inputs():
            remaining[tensor.name] -= 1
            if not remaining[tensor.name] and tensor.name not in wanted:
                known.pop(tensor.name, None)
    return {name: known[name] for name in wanted if name in known}


def sizes_of(graph: TorchModuleIRGraph, inputs: Sequence[torch.Tensor]) -> dict[sympy.Symbol, int]:
    """Return what each symbol stands for: an axis declared dynamic is a bare symbol in the input's shape."""
    return {
        dim: int(size)
        for variable, tensor in zip(graph.inputs, inputs, strict=True)
        for dim, size in zip(variable.shape, tensor.shape, strict=True)
        if isinstance(dim, sympy.Symbol)
    }


def number_of(expression: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> bool | int | float:
    """Return what an expression of sizes is when each symbol stands for a number."""
    value = expression.subs(sizes)  # type: ignore[no-untyped-call]
    if isinstance(value, (sympy.logic.boolalg.BooleanTrue, sympy.logic.boolalg.BooleanFalse)):
        return bool(value)
    return int(value) if value.is_integer else float(value)


class _UnknownValueError(Exception):
    """An operand could not be computed."""


class _Arguments:
    """Captured arguments as PyTorch takes them."""

    def __init__(self, known: Mapping[str, torch.Tensor], sizes: Mapping[sympy.Symbol, int], stored: Stored) -> None:
        self._known = known
        self.sizes = sizes
        self.stored = stored

    def real(self, argument: Any) -> Any:
        """Return tensors for variables, numbers for sizes."""
        if isinstance(argument, TensorVariable):
            return self._tensor(argument.name)
        if isinstance(argument, (FixedTensorList, tuple)):
            return [self.real(element) for element in argument]
        if isinstance(argument, sympy.Basic):
            return number_of(argument, self.sizes)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _tensor(self, name: str) -> torch.Tensor:
        if name in self._known:
            return self._known[name]
        tensor = self.stored(name)
        if tensor is None:
            raise _UnknownValueError(name)
        return tensor.detach().cpu()


def _results(op: TorchOp, arguments: _Arguments) -> Sequence[torch.Tensor | None]:
    """Run one operator; None for what it cannot give."""
    nothing: Sequence[None] = [None] * len(op.outputs)
    try:
        if op.target is SCAN:
            return _scan(op, arguments)
        args = [arguments.real(argument) for argument in op.args]
        kwargs = {name: arguments.real(argument) for name, argument in op.kwargs.items()}
        result = _unit(args) if op.target is _UNIT else op.target(*args, **kwargs)
    except _UnknownValueError:
        return nothing
    except Exception as error:  # an operator that exists in captured graphs only, or has no kernel here
        log.info("%s at %s cannot be run alone: %s", op.target, op.module_path or "(root)", error)
        return nothing
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    return results if len(results) == len(op.outputs) else nothing


def _unit(args: Sequence[Any]) -> list[torch.Tensor]:
    """Run a module that was captured as one operator, with the parameters and buffers that it is given."""
    inputs, state, key = args[0], args[1], args[2]
    module = module_of(key)
    tensors = dict(zip(state_names(module), state, strict=True))
    result = _called(module, tensors, inputs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _called(module: nn.Module, tensors: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
    """Call a module with flat inputs: recurrent ones take their initial states as a tuple."""
    call = torch.func.functional_call
    if isinstance(module, nn.LSTM) and len(inputs) > 1:
        return call(module, dict(tensors), (inputs[0], tuple(inputs[1:])))
    return call(module, dict(tensors), tuple(inputs))


def _scan(op: TorchOp, arguments: _Arguments) -> list[torch.Tensor | None]:
    """Run a captured loop over the first axis: (states, slices, constants) -> (next states, results), stacked."""
    states, sequences, constants = (arguments.real(argument) for argument in op.args[:3])
    body: TorchModuleIRGraph = op.args[3]
    steps: list[list[torch.Tensor]] = []
    for position in range(sequences[0].shape[0]):
        given = [*states, *(sequence[position] for sequence in sequences), *constants]
        known = {variable.name: value for variable, value in zip(body.inputs, given, strict=True)}
        names = [variable.name for variable in body.outputs]
        found = _run(body, known, arguments.sizes, arguments.stored, frozenset(names))
        results = [found[name] if name in found else arguments.stored(name) for name in names]
        if any(result is None for result in results):
            raise _UnknownValueError(str(op.target))
        whole = [result for result in results if result is not None]
        states = whole[: len(states)]
        steps.append(whole[len(states) :])
    stacked = [torch.stack(column) for column in zip(*steps, strict=True)]
    return [*states, *stacked]


__all__ = ["Stored", "Watch", "number_of", "replay", "sizes_of"]

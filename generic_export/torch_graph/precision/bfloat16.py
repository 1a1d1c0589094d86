"""Arithmetic that a model does in bf16 by itself (Falcon's and BLOOM's biases of positions), written in f32 with bf16's rounding.

In: a captured graph whose inputs, parameters and outputs are of other element types. Out: the same values, without bf16, which
tract does not have. Where an operator is none of those below the graph stays as it is, and its translation refuses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from generic_export.compat import OpOverload
from generic_export.torch_graph.ir import Argument, TensorKind, TensorVariable, TorchModuleIRGraph, TorchOp

aten = torch.ops.aten

_CASTS = frozenset({aten.to.dtype, aten._to_copy.default})
# PyTorch computes these in f32 and rounds the result once.
_ARITHMETIC = frozenset({aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor})
# These move values about, or change their sign.
_EXACT = frozenset(
    {
        *(aten.neg.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default),
        *(aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.transpose.int, aten.t.default),
        *(aten.permute.default, aten.clone.default, aten.contiguous.default, aten.detach.default),
    }
)
_SHIFT = 2.0**16  # f32 has 16 bits more than bf16


def without_bfloat16(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Return a graph without bf16 where all that it does in bf16 can be done in f32, bit for bit; else the graph."""
    fixed = (*graph.inputs, *graph.parameters, *graph.outputs)
    narrow = [op for op in graph.ops if _narrow_inputs(op) or _is_narrow_result(op)]
    if not narrow or any(map(_is_narrow, fixed)) or not all(map(_can_be_wide, narrow)):
        return graph
    return replace(graph, ops=tuple(itertools.chain.from_iterable(map(_widened, graph.ops))))


def _is_narrow(variable: TensorVariable | None) -> bool:
    return variable is not None and variable.dtype is torch.bfloat16


def _is_narrow_result(op: TorchOp) -> bool:
    return any(map(_is_narrow, op.outputs))


def _narrow_inputs(op: TorchOp) -> bool:
    return any(map(_is_narrow, op.tensor_inputs()))


def _can_be_wide(op: TorchOp) -> bool:
    if any(_is_narrow(tensor) and tensor.kind is not TensorKind.RESULT for tensor in op.tensor_inputs()):
        return False
    if op.target in _CASTS:
        return True
    if not _is_narrow_result(op):
        return False
    if op.target in _ARITHMETIC:
        # Of a number, or a tensor that is one, PyTorch rounds some and not others.
        return not op.kwargs and all(isinstance(arg, TensorVariable) and arg.rank for arg in op.args)
    return op.target in _EXACT


def _widened(op: TorchOp) -> Iterator[TorchOp]:
    """Yield what stands in the place of an operator."""
    if not (_narrow_inputs(op) or _is_narrow_result(op)):
        yield op
    elif not _is_narrow_result(op):  # a cast out of bf16
        yield replace(op, args=_wide_arguments(op.args))
    elif op.target in _CASTS:
        yield from _rounded_cast(op, op.args[0], _wide(op.output))
    elif op.target in _EXACT:
        yield replace(op, args=_wide_arguments(op.args), outputs=(_wide(op.output),))
    else:
        yield from _arithmetic(op)


def _arithmetic(op: TorchOp) -> Iterator[TorchOp]:
    operands = []
    for place, operand in enumerate(op.args):
        if not _is_narrow(operand):  # positions: rounded to bf16 before they are multiplied
            rounded = TensorVariable(f"{op.output.name}:{place}", operand.shape, torch.float32, TensorKind.RESULT)
            yield from _rounded_cast(op, operand, rounded)
            operand = rounded
        operands.append(_wide(operand))
    exact = replace(_wide(op.output), name=f"{op.output.name}:exact")
    yield replace(op, args=tuple(operands), outputs=(exact,))
    yield from _rounded(op, exact, _wide(op.output))


def _wide(variable: TensorVariable) -> TensorVariable:
    return replace(variable, dtype=torch.float32)


def _wide_arguments(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    return tuple(_wide(each) if isinstance(each, TensorVariable) and _is_narrow(each) else each for each in arguments)


def _rounded_cast(origin: TorchOp, source: TensorVariable, result: TensorVariable) -> Iterator[TorchOp]:
    widened = TensorVariable(f"{result.name}:f32", source.shape, torch.float32, TensorKind.RESULT)
    yield _operator(origin, aten.to.dtype, (_wide(source) if _is_narrow(source) else source, torch.float32), widened)
    yield from _rounded(origin, widened, result)


def _rounded(origin: TorchOp, value: TensorVariable, result: TensorVariable) -> Iterator[TorchOp]:
    """Round to 8 bits, ties to even, by sums that leave no room for more (Dekker 1971, section 5).

    v = (x + 2^16 x) - 2^16 x has the size of the result, up to one unit; (x + 2^16 v) - 2^16 v is the result. Both differences
    are exact. Finite, and below 2^111.
    """
    near = replace(value, name=f"{result.name}:near")
    yield from _sum_and_back(origin, value, value, near)
    yield from _sum_and_back(origin, value, near, result)


def _sum_and_back(
    origin: TorchOp, value: TensorVariable, scale: TensorVariable, result: TensorVariable
) -> Iterator[TorchOp]:
    large, whole = (replace(value, name=f"{result.name}:{part}") for part in ("large", "sum"))
    yield _operator(origin, aten.mul.Tensor, (scale, _SHIFT), large)
    yield _operator(origin, aten.add.Tensor, (value, large), whole)
    yield _operator(origin, aten.sub.Tensor, (whole, large), result)


def _operator(origin: TorchOp, target: OpOverload, arguments: tuple[Argument, ...], result: TensorVariable) -> TorchOp:
    return replace(origin, target=target, args=arguments, kwargs={}, outputs=(result,))


__all__ = ["without_bfloat16"]

"""Arithmetic on numbers that are known while a module is captured, done once: its result is a number in the graph.

In: a captured graph in which a model computes a constant from constants (a quantile, a scale). Out: the same, filled in. tract
would do it with f32 literals, whatever the element type (facts/tract.md §2.2).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from generic_export.torch_graph.fusion import GraphView
from generic_export.torch_graph.ir import TensorVariable, TorchOp

aten = torch.ops.aten

_ALSO = frozenset(
    {
        aten.where.self,
        aten._to_copy.default,
        aten.clone.default,
        aten.to.dtype,
        aten.type_as.default,
        aten.detach.default,
    }
)
_PLACE = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


def fold_numbers(view: GraphView, root: TorchOp) -> TorchOp | None:
    """f(full((), 2.0)) -> full((), f(2.0)) for element-wise f"""
    if not any(True for _ in root.tensor_inputs()):
        return None
    known = _value(view, root, {})
    if known is None:
        return None
    number = known.item()
    if isinstance(number, complex) or (isinstance(number, float) and math.isnan(number)):
        return None
    kwargs = {"dtype": root.output.dtype}
    return replace(root, target=aten.full.default, args=((), number), kwargs=kwargs)  # type: ignore[arg-type]


def _value(view: GraphView, op: TorchOp, seen: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    """Return the number that an operator makes; None when it depends on anything else than numbers."""
    output = op.outputs[0] if len(op.outputs) == 1 else None
    if output is None or output.rank:
        return None
    if output.name not in seen:
        seen[output.name] = None
        seen[output.name] = _computed(view, op, seen)
    return seen[output.name]


def _number(view: GraphView, value: TensorVariable, seen: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    maker = view.maker(value)
    if maker is not None:
        return _value(view, maker, seen)
    constant = view.constant(value)
    return constant.detach().cpu() if constant is not None and constant.ndim == 0 else None


def _computed(view: GraphView, op: TorchOp, seen: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    if op.target in (aten.full.default, aten.full_like.default):  # the latter's shape is its result's, of rank 0
        number = op.args[1]
        return torch.full((), number, dtype=op.outputs[0].dtype) if isinstance(number, bool | int | float) else None  # type: ignore[union-attr]
    if torch.Tag.pointwise not in op.target.tags and op.target not in _ALSO:
        return None
    arguments = []
    for argument in (*op.args, *(value for name, value in op.kwargs.items() if name not in _PLACE)):
        if isinstance(argument, TensorVariable):
            argument = _number(view, argument, seen)
            if argument is None:
                return None
        elif not (argument is None or isinstance(argument, bool | int | float | torch.dtype)):
            return None
        arguments.append(argument)
    names = [name for name in op.kwargs if name not in _PLACE]
    positional = arguments[: len(op.args)]
    with torch.no_grad():
        result = op.target(*positional, **dict(zip(names, arguments[len(op.args) :], strict=True)))
    return result if isinstance(result, torch.Tensor) else None


__all__ = ["fold_numbers"]

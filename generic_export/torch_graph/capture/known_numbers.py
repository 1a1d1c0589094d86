"""Arithmetic on numbers that are known while a module is captured, done once: its result is a number in the graph.

In: a captured graph in which a model computes a constant from constants (a quantile, a scale, padding, the sum of a mask
that hides nothing). Out: the same, filled in. tract would do it with f32 literals, whatever the element type
(docs/contributing/engine-facts.md#identifiers-and-literals), and meets patches that it cannot apply where equal ones stand side by
side (MarkupLM's paths, TimesFM's masks; docs/contributing/engine-facts.md#rewrites-that-fail-or-lose-values).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from generic_export.compat import OpOverload
from generic_export.torch_graph.fusion import GraphView
from generic_export.torch_graph.ir import Argument, TensorVariable, TorchOp

aten = torch.ops.aten

_SELECTS = frozenset({aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther})
_ALSO = _SELECTS | {aten.clone.default, aten.detach.default}
_CASTS = frozenset(
    {
        aten._to_copy.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
    }
)
_PLACE = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})

_FILLED: Mapping[OpOverload, int | str] = {
    aten.full.default: "fill_value",
    aten.full_like.default: "fill_value",
    aten.new_full.default: "fill_value",
    aten.scalar_tensor.default: "s",
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
}
"""What fills a tensor with a number, or with that of an argument of this name."""

_MOVES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.repeat.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.select.int,
        aten.flatten.using_ints,
        aten.alias.default,
        aten.contiguous.default,
        aten.flip.default,
        aten.unbind.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
    }
)
"""What moves values and makes none: where all are equal, they still are."""

_JOINS = frozenset({aten.cat.default, aten.stack.default})
_NOT_FOLDED = _MOVES | _JOINS | _FILLED.keys()
_NEUTRAL: Mapping[OpOverload, bool] = {
    aten.bitwise_and.Tensor: True,
    aten.logical_and.default: True,
    aten.bitwise_or.Tensor: False,
    aten.logical_or.default: False,
}
"""What leaves the other operand as it is; its opposite decides alone."""
_PADS = frozenset({aten.pad.default, aten.constant_pad_nd.default})
_CHOICES = frozenset(
    {aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim, aten.any.default, aten.all.default}
)
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
_MOST_SUMMED = 1 << 16


def fold_numbers(view: GraphView, root: TorchOp) -> TorchOp | None:
    """f(full(shape, 2.0)) -> full(shape, f(2.0)) for element-wise f, and for sums"""
    # Every operator is looked at, in order: what is asked of its operands is known by then, however long the way to them is.
    known = [None if output is None else _number(view, output) for output in root.outputs]
    if root.target in _NOT_FOLDED or not any(True for _ in root.tensor_inputs()):
        return None
    if len(known) != 1:
        return None
    if known[0] is None:
        return _chosen(view, root)
    number = known[0].item()
    if isinstance(number, complex) or (isinstance(number, float) and math.isnan(number)):
        return None
    shape, kwargs = root.output.shape, {"dtype": root.output.dtype}
    return replace(root, target=aten.full.default, args=(shape, number), kwargs=kwargs)  # type: ignore[arg-type]


def _chosen(view: GraphView, root: TorchOp) -> TorchOp | None:
    """where(full(shape, True), a, b), and(full(shape, True), a) -> expand(a, shape)

    tract takes a condition that is the same everywhere for one of size 1, and does not load some graphs with such a mask (LongT5).
    """
    chosen = None
    if root.target in _SELECTS and (condition := _of_first(view, root)) is not None:
        chosen = root.args[1 if condition.item() else 2]
    elif root.target in _NEUTRAL:
        chosen = _other_operand(view, root)
    if not isinstance(chosen, TensorVariable) or chosen.dtype != root.output.dtype:
        return None
    return replace(root, target=aten.expand.default, args=(chosen, root.output.shape), kwargs={})


def _other_operand(view: GraphView, root: TorchOp) -> Argument | None:
    """Return the operand of a logical operator whose other one changes nothing."""
    for number, other in (root.args[:2], root.args[1::-1]):
        known = _number(view, number) if isinstance(number, TensorVariable) and number.dtype is torch.bool else None
        if known is not None and known.item() is _NEUTRAL[root.target]:
            return other
    return None


def _number(view: GraphView, value: TensorVariable) -> torch.Tensor | None:
    """Return the number that all of a tensor's values are, as a tensor of its rank; None where they differ, or depend on inputs."""
    seen = view.numbers
    if value.name not in seen:
        seen[value.name] = None
        maker = view.maker(value)
        found = _stored(view, value) if maker is None else _made(view, maker, value)
        if found is not None and found.numel() == 1:
            seen[value.name] = found.to(value.dtype).reshape((1,) * value.rank)
    return seen[value.name]


def _stored(view: GraphView, value: TensorVariable) -> torch.Tensor | None:
    constant = view.constant(value)
    return constant.detach().cpu() if constant is not None and constant.ndim == 0 else None


def _made(view: GraphView, op: TorchOp, value: TensorVariable) -> torch.Tensor | None:
    if op.target in _FILLED:
        filler = _FILLED[op.target]
        number = op.arguments()[filler] if isinstance(filler, str) else filler
        return torch.full((), number, dtype=value.dtype) if isinstance(number, bool | int | float) else None
    if op.target in _MOVES | _CASTS:
        return _of_first(view, op)
    if op.target in _JOINS:
        return _of_all(view, op)
    if op.target in _PADS:
        return _padded(view, op)
    if op.target in _CHOICES:
        return _of_first(view, op) if _count(op) else None
    if op.target in _SUMS:
        first, count = _of_first(view, op), _count(op)
        known = first is not None and count is not None and count <= _MOST_SUMMED
        return first.expand(count, *first.shape).sum(0) if known else None  # type: ignore[union-attr, arg-type]
    if op.target in _NEUTRAL and (decided := _decided(view, op)) is not None:
        return decided
    if torch.Tag.nondeterministic_seeded in op.target.tags or len(op.outputs) != 1:
        return None
    if torch.Tag.pointwise in op.target.tags or op.target in _ALSO:
        return _computed(view, op)
    return None


def _of_first(view: GraphView, op: TorchOp) -> torch.Tensor | None:
    return _number(view, op.args[0]) if isinstance(op.args[0], TensorVariable) else None


def _decided(view: GraphView, op: TorchOp) -> torch.Tensor | None:
    """Return what one operand of a logical operator makes it, whatever the other one is."""
    operands = [each for each in op.args if isinstance(each, TensorVariable) and each.dtype is torch.bool]
    known = [number for each in operands if (number := _number(view, each)) is not None]
    return next((number for number in known if number.item() is not _NEUTRAL[op.target]), None)


def _padded(view: GraphView, op: TorchOp) -> torch.Tensor | None:
    """Return the number of a tensor that is padded with the same number."""
    found, given = _of_first(view, op), op.arguments()
    if found is None or given.get("mode", "constant") != "constant":
        return None
    return found if found.item() == (given.get("value") or 0) else None


def _of_all(view: GraphView, op: TorchOp) -> torch.Tensor | None:
    """Return the number that several tensors have in common; NaN is equal to nothing."""
    found = [None if each is None else _number(view, each) for each in op.args[0]]
    numbers = {each.item() for each in found if each is not None}
    return found[0] if None not in found and len(numbers) == 1 else None


def _count(op: TorchOp) -> int | None:
    """Return how many values become one in a reduction; None where that depends on a dynamic size."""
    source = op.args[0]
    if not isinstance(source, TensorVariable):
        return None
    if not source.rank:  # PyTorch lets one name the axis 0 of a tensor without axes
        return 1
    axes = op.args[1] if len(op.args) > 1 else None
    listed = range(source.rank) if axes is None or axes == () else (axes if isinstance(axes, tuple) else (axes,))
    sizes = [source.shape[axis] for axis in listed]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None  # type: ignore[arg-type]


def _computed(view: GraphView, op: TorchOp) -> torch.Tensor | None:
    arguments = []
    for argument in (*op.args, *(value for name, value in op.kwargs.items() if name not in _PLACE)):
        if isinstance(argument, TensorVariable):
            argument = _number(view, argument)
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

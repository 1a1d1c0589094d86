"""`as_strided` of tensors whose memory is known: contiguous ones, and windows such as Longformer's overlapping chunks.

In: a program without writes. Out: the same one, edited in place. A graph has no memory layout, but PyTorch says what it is where
the program was captured. Reads by strides of contiguous tensors become `as_strided_copy`, which nothing else is, and windows of
others become `unfold`. What is left is refused by the translation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_sure

from generic_export.torch_graph.decompose.decomposition import ORIGIN

aten = torch.ops.aten


def with_known_strides(program: ExportedProgram) -> None:
    """Tell reads by strides of contiguous tensors from all others, and write those that are windows as `unfold`."""
    for node in list(program.graph.nodes):
        if node.target in (aten.as_strided.default, aten.as_strided_copy.default):
            source: Any = node.args[0]
            if _is_contiguous(source.meta["val"]):
                node.target = aten.as_strided_copy.default
            elif (windows := _windows(source.meta["val"], node.meta["val"])) is not None:
                _write_windows(node, source, windows)
            else:
                node.target = aten.as_strided.default


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Say whether the elements lie in the order of their indices, from the beginning of the memory on.

    Where that needs a relation between sizes (`view` of a multiple), it is asked for, and becomes a condition of the archive.
    """
    step: Any = 1
    known = is_sure(tensor.storage_offset() == 0)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        known = known and (is_sure(size == 1) or _are_equal(stride, step))
        step = step * size
    return known


def _are_equal(stride: Any, step: Any) -> bool:
    same = stride == step
    if not isinstance(same, torch.SymBool):
        return bool(same)
    return is_sure(same) or (bool(same.node.hint) and bool(same))


# --- windows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """Neighbouring axes of a tensor that lie in memory as one: `count` elements, each `stride` further on."""

    first: int
    last: int
    count: Any
    stride: Any


@dataclass(frozen=True)
class _Window:
    """How a strided view reads one axis: once, as one of its own, or in windows of a length, as two."""

    places: tuple[int, ...]
    length: int = 0
    step: int = 1


@dataclass(frozen=True)
class _Windows:
    """How a strided view reads a tensor.

    Attributes:
        axes: of the tensor, joined where they can be.
        windows: of each.
        order: of the axes of the view, among those of the tensor and then those within windows.
    """

    axes: tuple[_Axis, ...]
    windows: tuple[_Window, ...]
    order: tuple[int, ...]


def _windows(source: torch.Tensor, view: torch.Tensor) -> _Windows | None:
    """Return the windows that a view makes of a tensor; None where it reads it in another way.

    The address of an element is the sum of index times stride over the axes. Where each axis of the view has the stride of one
    axis of the tensor, or a multiple of it, and the indices stay below its length, both read the same elements.
    """
    if not is_sure(source.storage_offset() == view.storage_offset()):
        return None
    axes = _joined(source)
    read: list[list[tuple[int, int]]] = [[] for _ in axes]  # for each axis, those of the view, and their steps
    for place, stride in enumerate(view.stride()):
        steps = [(step, number) for number, axis in enumerate(axes) if (step := _quotient(stride, axis.stride))]
        if not steps:
            return None
        step, number = min(steps)
        read[number].append((step, place))
    found: list[_Window] = []
    for axis, own in zip(axes, read, strict=True):
        window = _window(axis, sorted(own, reverse=True), view.shape)
        if window is None:
            return None
        found.append(window)
    # `unfold` appends the axis within a window.
    places = [window.places[0] for window in found] + [place for window in found for place in window.places[1:]]
    return _Windows(axes, tuple(found), tuple(map(places.index, range(view.dim()))))


def _joined(tensor: torch.Tensor) -> tuple[_Axis, ...]:
    axes: list[_Axis] = []
    for number, (count, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        before = axes[-1] if axes else None
        if before is not None and _same(before.stride, count * stride):
            axes[-1] = _Axis(before.first, number, before.count * count, stride)
        else:
            axes.append(_Axis(number, number, count, stride))
    return tuple(axes)


def _window(axis: _Axis, own: Sequence[tuple[int, int]], shape: Sequence[Any]) -> _Window | None:
    """Return how axes of a view, with their steps, read one of the tensor; None where they leave something out."""
    if len(own) == 1 and own[0][0] == 1 and _same(shape[own[0][1]], axis.count):
        return _Window((own[0][1],))
    if len(own) != 2 or own[1][0] != 1:
        return None
    (step, outer), (_, inner) = own
    length = shape[inner]
    if not isinstance(length, int) or not _same((shape[outer] - 1) * step + length, axis.count):
        return None
    return _Window((outer, inner), length, step)


def _expression(size: Any) -> sympy.Expr:
    return sympy.expand(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _same(left: Any, right: Any) -> bool:
    return bool(sympy.expand(_expression(left) - _expression(right)) == 0) or is_sure(left == right)


def _quotient(stride: Any, unit: Any) -> int | None:
    """Return how often one stride is in another one; None where that is no number."""
    found = sympy.cancel(_expression(stride) / _expression(unit)) if _expression(unit) != 0 else sympy.nan
    return int(found) if found.is_Integer and found > 0 else None


def _write_windows(node: Node, source: Node, windows: _Windows) -> None:
    """Put `flatten`, `unfold` and `permute` where a strided view was."""
    graph, value, shape = node.graph, source, list(source.meta["val"].shape)
    origin = {key: node.meta[key] for key in ORIGIN if key in node.meta}

    def put(target: Any, *args: Any, sizes: Sequence[Any]) -> Node:
        with graph.inserting_before(node):
            made = graph.call_function(target, args)
        made.meta |= {**origin, "val": source.meta["val"].new_empty(tuple(sizes))}
        return made

    for axis in reversed(windows.axes):
        if axis.last > axis.first:
            shape[axis.first : axis.last + 1] = [axis.count]
            value = put(aten.flatten.using_ints, value, axis.first, axis.last, sizes=shape)
    for number, window in enumerate(windows.windows):
        if window.length:
            count = node.meta["val"].shape[window.places[0]]
            shape = [*shape[:number], count, *shape[number + 1 :], window.length]
            value = put(aten.unfold.default, value, number, window.length, window.step, sizes=shape)
    value = put(aten.permute.default, value, list(windows.order), sizes=node.meta["val"].shape)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


__all__ = ["with_known_strides"]

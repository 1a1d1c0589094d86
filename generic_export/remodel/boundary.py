"""A plan held against a sub-graph: every input and output of the module, and what each is outside.

In: made by `resolve.py`. Out: what `adapter.py` computes with and `stages.py` shows. Everything is decided here, by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from generic_export.remodel.plan import AxisName
from generic_export.remodel.symbols import Relations
from generic_export.torch_graph.nested import FlatCall


@dataclass(frozen=True)
class SizeOf:
    """The size of an axis of another input of the module."""

    source: int
    axis: int


@dataclass(frozen=True)
class SameAs:
    """The values of another input of the module."""

    source: int


@dataclass(frozen=True)
class Fixed:
    """Values that never change, in the input's element type."""

    value: torch.Tensor


BoundTo: TypeAlias = SizeOf | SameAs | Fixed


@dataclass(frozen=True)
class InputBoundary:
    """One input of the module.

    Attributes:
        name: what the module calls it.
        outer_name: what the archive calls it.
        dtype, device: of the tensor.
        raw_dims: its axes, by the module's own symbols.
        dims: its axes, by the archive's symbols.
        collapsed: axes that the archive does not have.
        bound: where its values come from, when the archive does not have it.
        told: that, as the plan says it.
    """

    name: str
    outer_name: str
    dtype: torch.dtype
    device: torch.device
    raw_dims: tuple[AxisName, ...]
    dims: tuple[AxisName, ...]
    collapsed: tuple[int, ...] = ()
    bound: BoundTo | None = None
    told: str = ""


@dataclass(frozen=True)
class OutputBoundary:
    """One output of the module.

    Attributes:
        name: what the module calls it.
        outer_name: what the archive calls it.
        dtype: of the tensor.
        dims: its axes: a size, a symbol, or `f(T)` for a size that depends on `T` in another way.
        collapsed: axes that the archive does not have.
    """

    name: str
    outer_name: str
    dtype: torch.dtype
    dims: tuple[AxisName, ...]
    collapsed: tuple[int, ...] = ()


@dataclass(frozen=True)
class InputSide:
    """All inputs of the module, and how the archive's become those.

    Attributes:
        call: how the forward's arguments are put together.
        inputs: in the module's order.
        order: positions of the bound ones, each after what it is computed from.
        carriers: by symbol, the input and the axis that its size is read from.
        fixed: sizes of symbols that are fixed.
    """

    call: FlatCall
    inputs: tuple[InputBoundary, ...]
    order: tuple[int, ...]
    carriers: Mapping[str, tuple[int, int]]
    fixed: Mapping[str, int]

    @property
    def outer(self) -> tuple[InputBoundary, ...]:
        """The inputs of the archive."""
        return tuple(one for one in self.inputs if one.bound is None)

    def outer_dims(self, one: InputBoundary) -> tuple[AxisName, ...]:
        """Return the axes of an input in the archive."""
        kept = [dim for axis, dim in enumerate(one.dims) if axis not in one.collapsed]
        return tuple(self.fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in kept)

    def inner(self, outer: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the module's inputs from the archive's: axes put back, bound ones computed."""
        tensors = []
        for one, tensor in zip(self.outer, outer, strict=True):
            for axis in one.collapsed:
                tensor = tensor.unsqueeze(axis)
            tensors.append(tensor)
        return self.completed(tensors)

    def completed(self, unbound: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the module's inputs, bound ones computed from the others.

        Args:
            unbound: the others, with all axes that the module sees.
        """
        given = iter(unbound)
        tensors: list[torch.Tensor | None] = [next(given) if one.bound is None else None for one in self.inputs]
        for position in self.order:
            tensors[position] = self._bound(self.inputs[position], tensors)
        return [tensor for tensor in tensors if tensor is not None]

    def _bound(self, one: InputBoundary, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        sizes = [self._size(dim, tensors) for dim in one.dims]
        if isinstance(one.bound, SizeOf):
            source = tensors[one.bound.source]
            size = source.shape[one.bound.axis] if source is not None else 0
            return torch.full(sizes, size, dtype=one.dtype, device=one.device)
        if isinstance(one.bound, SameAs):
            value = tensors[one.bound.source]
        else:
            value = one.bound.value if one.bound is not None else None
        if value is None:  # `order` puts the source first
            raise RuntimeError(f"input {one.name!r} is computed before its source")
        return value.to(one.dtype).expand(sizes)

    def _size(self, dim: AxisName, tensors: Sequence[torch.Tensor | None]) -> int:
        if isinstance(dim, int):
            return dim
        position, axis = self.carriers.get(dim, (-1, 0))
        carrier = tensors[position] if position >= 0 else None
        return self.fixed[dim] if carrier is None else carrier.shape[axis]


@dataclass(frozen=True)
class Boundary:
    """What a plan makes of one sub-graph.

    Attributes:
        name: of the sub-graph.
        side: its inputs.
        outputs: all outputs of the module, in its order.
        kept: positions of the outputs of the archive, in the archive's order.
        relations: what holds between the symbols.
        own_assertions: what the sub-graph itself said of them.
        example: example inputs of the archive.
    """

    name: str
    side: InputSide
    outputs: tuple[OutputBoundary, ...]
    kept: tuple[int, ...]
    relations: Relations
    own_assertions: tuple[str, ...]
    example: tuple[torch.Tensor, ...]

    @property
    def outer_outputs(self) -> tuple[OutputBoundary, ...]:
        """The outputs of the archive, in order."""
        return tuple(self.outputs[position] for position in self.kept)

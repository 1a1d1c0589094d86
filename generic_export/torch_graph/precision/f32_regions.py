"""Tensors that f16 does not hold, kept in f32 inside an f16 graph: casts at the borders, and everything else stays f16.

In: a captured f16 graph, and the names of those tensors. Out: the graph in which they are f32. Products with stored matrices stay
f16: a multiplication by one stands between them and an island, where rescaling has a place to write a power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from generic_export.torch_graph.ir import TensorKind, TensorVariable, TorchModuleIRGraph, TorchOp
from generic_export.torch_graph.precision.magnitudes import op_in_f32
from generic_export.torch_graph.precision.scale_boundaries import with_tensors
from generic_export.torch_graph.precision.scale_groups import fixed_tensors, floats_of, operator_name

aten = torch.ops.aten

_CASTS = frozenset({"aten::to", "aten::_to_copy", "aten::type_as", "aten::float", "aten::half"})

# The stored matrix that an operator multiplies with, or picks from, by name in its schema.
_MATRICES: Mapping[str, tuple[str, ...]] = {
    "aten::linear": ("weight",),
    "aten::addmm": ("mat2", "mat1"),
    "aten::mm": ("mat2", "self"),
    "aten::bmm": ("mat2", "self"),
    "aten::matmul": ("other", "self"),
    "aten::conv1d": ("weight",),
    "aten::conv2d": ("weight",),
    "aten::embedding": ("weight",),
    "t2n::grouped_linear": ("weight",),
    "t2n::experts": ("down",),
}
_READS_AS_IT_IS = "t2n::experts"  # an activation is inside: its input cannot be kept smaller


def with_f32_regions(
    graph: TorchModuleIRGraph, names: Collection[str], largest: Mapping[str, float]
) -> tuple[TorchModuleIRGraph, Mapping[str, float]]:
    """Return a graph that computes the same with some tensors in f32, and the magnitudes of its tensors.

    Args:
        graph: captured in f16.
        names: of f16 tensors, none of them an input or an output of the graph.
        largest: magnitude of each tensor of the graph, by name.
    """
    if not names:
        return graph, largest
    walk = _Walk(graph, frozenset(names), fixed_tensors(graph), dict(largest))
    for op in graph.ops:
        walk.rewrite(op)
    return _without_idle_casts(replace(graph, ops=tuple(walk.ops)), walk.widened), walk.largest


def _without_idle_casts(graph: TorchModuleIRGraph, names: Collection[str]) -> TorchModuleIRGraph:
    """Return the graph without what makes some tensors in f16, where all that reads them took them in f32."""
    uses = graph.use_counts()
    unread = {name for name in names if name not in uses}
    made = tuple(op for op in graph.ops if not any(out is not None and out.name in unread for out in op.outputs))
    return replace(graph, ops=made)


@dataclass
class _Walk:
    """Walks the operators once, in order.

    Attributes:
        graph: as captured.
        names: of what is kept in f32.
        fixed: see `fixed_tensors`.
        largest: grows by what is written.
        ops: what is written so far.
        narrowed, widened: name -> the tensor in the other element type, written once.
    """

    graph: TorchModuleIRGraph
    names: frozenset[str]
    fixed: frozenset[str]
    largest: dict[str, float]
    ops: list[TorchOp] = field(default_factory=list)
    narrowed: dict[str, TensorVariable] = field(default_factory=dict)
    widened: dict[str, TensorVariable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._taken = {*self.graph.use_counts(), *self.graph.producers()}

    def rewrite(self, op: TorchOp) -> None:
        """Write what stands for an operator."""
        reads = any(tensor.name in self.names for tensor in floats_of(op))
        if not reads and not any(self._is_kept(out) for out in op.outputs):
            self.ops.append(op)
        elif operator_name(op) in _CASTS:
            self._cast(op)
        elif self._stays_half(op, reads):
            self._in_half(op)
        else:
            self._in_full(op)

    # --- the kinds of operator -----------------------------------------------------------------------

    def _cast(self, op: TorchOp) -> None:
        source, made = floats_of(op)[0], op.output
        wanted = torch.float32 if self._is_kept(made) else made.dtype
        self.ops.append(_cast_to(op, self._retyped(source), replace(made, dtype=wanted)))

    def _in_half(self, op: TorchOp) -> None:
        """An operator that stays as it is: it reads f16 twins of what is kept in f32, and so is what it makes."""
        twins = {each.name: self._narrow(each, op) for each in floats_of(op) if each.name in self.names}
        raw = tuple(self._like(out, out.dtype) if out is not None and self._is_kept(out) else out for out in op.outputs)
        self.ops.append(replace(with_tensors(op, twins), outputs=raw))
        for half, made in zip(raw, op.outputs, strict=True):
            if half is not None and made is not None and half is not made:
                full = self._like(made, torch.float32)
                self.ops.append(_cast_to(op, half, full))
                self.ops.append(_times_one(op, full, replace(made, dtype=torch.float32)))

    def _in_full(self, op: TorchOp) -> None:
        """An operator that computes in f32; what it makes of f16 is cast."""
        swapped = {each.name: self._wide(each, op) for each in floats_of(op) if each.dtype is torch.float16}
        casts, outputs = [], []
        for made in op.outputs:
            full = made
            if made is not None and made.dtype is torch.float16:
                kept = self._is_kept(made)
                full = replace(made, dtype=torch.float32) if kept else self._like(made, torch.float32)
                if not kept:
                    casts.append(_cast_to(op, full, made))
                    self.widened[made.name] = full
            outputs.append(full)
        self.ops += [replace(with_tensors(op_in_f32(op), swapped), outputs=tuple(outputs)), *casts]

    # --- pieces --------------------------------------------------------------------------------------

    def _is_kept(self, tensor: TensorVariable | None) -> bool:
        return tensor is not None and tensor.name in self.names

    def _stays_half(self, op: TorchOp, reads: bool) -> bool:
        """Say whether an operator reads a stored matrix, which is not to be widened, or a loop's body, which is f16."""
        name, given = operator_name(op), op.arguments()
        if any(isinstance(argument, TorchModuleIRGraph) for argument in given.values()):
            return True
        if name == _READS_AS_IT_IS and reads:
            return False
        matrices = (given.get(each) for each in _MATRICES.get(name, ()))
        return any(isinstance(each, TensorVariable) and each.name in self.fixed for each in matrices)

    def _retyped(self, tensor: TensorVariable) -> TensorVariable:
        return replace(tensor, dtype=torch.float32) if tensor.name in self.names else tensor

    def _wide(self, tensor: TensorVariable, near: TorchOp) -> TensorVariable:
        """Return a tensor in f32."""
        if tensor.name in self.names:
            return self._retyped(tensor)
        if tensor.name not in self.widened:
            self.widened[tensor.name] = self._like(tensor, torch.float32)
            self.ops.append(_cast_to(near, tensor, self.widened[tensor.name]))
        return self.widened[tensor.name]

    def _narrow(self, tensor: TensorVariable, near: TorchOp) -> TensorVariable:
        """Return the f16 twin of what is kept in f32."""
        if tensor.name not in self.narrowed:
            inside = self._like(tensor, torch.float32)
            twin = self._like(tensor, torch.float16)
            self.ops += [_times_one(near, self._retyped(tensor), inside), _cast_to(near, inside, twin)]
            self.narrowed[tensor.name] = twin
        return self.narrowed[tensor.name]

    def _like(self, tensor: TensorVariable, dtype: torch.dtype) -> TensorVariable:
        """Return a tensor of the same values, under a name that is free."""
        suffix = "half" if dtype is torch.float16 else "full"
        name, number = f"{tensor.name}_{suffix}", 1
        while name in self._taken:
            name, number = f"{tensor.name}_{suffix}_{number}", number + 1
        self._taken.add(name)
        if tensor.name in self.largest:
            self.largest[name] = self.largest[tensor.name]
        return replace(tensor, name=name, dtype=dtype, kind=TensorKind.RESULT)


def _cast_to(near: TorchOp, given: TensorVariable, made: TensorVariable) -> TorchOp:
    if given.dtype is made.dtype:
        return replace(near, target=aten.alias.default, args=(given,), kwargs={}, outputs=(made,))
    return replace(near, target=aten.to.dtype, args=(given, made.dtype), kwargs={}, outputs=(made,))


def _times_one(near: TorchOp, given: TensorVariable, made: TensorVariable) -> TorchOp:
    return replace(near, target=aten.mul.Tensor, args=(given, 1.0), kwargs={}, outputs=(made,))


__all__ = ["with_f32_regions"]

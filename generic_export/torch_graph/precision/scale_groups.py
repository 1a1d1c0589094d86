"""Which tensors of a graph keep one scale: those that additions, views and casts tie together, such as a residual stream.

In: a captured graph, and the largest magnitude of each tensor. Out: for each tensor the power of two that it is to be multiplied
with so that it fits f16, and the groups that cannot be. Found by the flow of data alone; no name of a model is known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from generic_export.torch_graph.ir import TensorVariable, TorchModuleIRGraph, TorchOp

F16_LIMIT = 65504.0
"""The largest f16 number (IEEE 754 binary16)."""

HEADROOM = 8.0
"""How many times larger a value may become than what was measured."""

_MASKS = 0.9 * F16_LIMIT  # a number this large that nobody has learned hides a position; it is no value of a stream

# Operators all of whose float operands and results have one scale: they move values, add them, or scale with their input.
_ONE_SCALE_NAMES = """
    abs add alias amax amin cat chunk clone contiguous cumsum detach dropout expand expand_as flatten flip float gather half index
    index_select maximum mean minimum movedim narrow neg permute relu repeat repeat_interleave reshape roll select select_scatter
    slice slice_scatter split split_with_sizes squeeze stack sub sum swapaxes t tile to _to_copy transpose type_as unbind unflatten
    unsqueeze _unsafe_view view view_as where
"""
_MASKING = frozenset({"aten::where", "aten::masked_fill", "aten::add", "aten::sub"})
_LIKE_ANOTHER = frozenset({"aten::expand_as", "aten::type_as", "aten::view_as"})  # their second operand gives no values
_ONE_SCALE = frozenset(f"aten::{name}" for name in _ONE_SCALE_NAMES.split())


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors that keep one scale, and overflow f16 or come near.

    Attributes:
        tensors: their names.
        largest: magnitude of the largest value that was measured in one that f16 would hold.
        where: path of the module that makes it.
        exponent: their values are multiplied with 2 ** exponent; 0 where that cannot be.
        obstacle: why it cannot be, or "".
        in_f32: they are kept in f32 instead; `tensors` are those alone that are.
    """

    tensors: frozenset[str]
    largest: float
    where: str
    exponent: int
    obstacle: str = ""
    in_f32: bool = False

    @property
    def overflows(self) -> bool:
        """Whether values were measured that f16 does not have."""
        return not self.largest <= F16_LIMIT


def is_float(value: object) -> bool:
    """Say whether an argument is a tensor of floats."""
    return isinstance(value, TensorVariable) and value.dtype.is_floating_point


def floats_of(op: TorchOp) -> list[TensorVariable]:
    """Return the float tensors that an operator reads, each once."""
    return list({tensor.name: tensor for tensor in op.tensor_inputs() if is_float(tensor)}.values())


def scaled_operands(op: TorchOp) -> list[TensorVariable]:
    """Return the float tensors whose scale an operator that keeps one gives to its results."""
    floats = floats_of(op)
    return floats[:1] if operator_name(op) in _LIKE_ANOTHER else floats


def float_results(op: TorchOp) -> list[TensorVariable]:
    """Return the float tensors that an operator makes."""
    return [variable for variable in op.outputs if variable is not None and is_float(variable)]


def keeps_one_scale(op: TorchOp) -> bool:
    """Say whether all float operands and results of an operator have one scale."""
    return operator_name(op) in _ONE_SCALE


def operator_name(op: TorchOp) -> str:
    """Return an operator's name without its overload: `aten::mul`."""
    name: str = op.target.name()
    return name.partition(".")[0]


def fixed_tensors(graph: TorchModuleIRGraph) -> frozenset[str]:
    """Return the names of the tensors that no input has a part in: parameters, constants, and what is made of those alone."""
    moving = _reached(graph, (variable.name for variable in graph.inputs))
    return frozenset(_names(graph) - moving)


def _names(graph: TorchModuleIRGraph) -> set[str]:
    """Return the names of all tensors that operators read or make."""
    read = {tensor.name for op in graph.ops for tensor in op.tensor_inputs()}
    return read | {variable.name for op in graph.ops for variable in op.outputs if variable is not None}


def _reached(graph: TorchModuleIRGraph, origins: Iterable[str]) -> set[str]:
    """Return the tensors that some have a part in, those included."""
    reached = set(origins)
    for op in graph.ops:
        if any(tensor.name in reached for tensor in op.tensor_inputs()):
            reached.update(variable.name for variable in op.outputs if variable is not None)
    return reached


def scale_groups(
    graph: TorchModuleIRGraph, largest: Mapping[str, float], fixed: frozenset[str]
) -> tuple[ScaleGroup, ...]:
    """Return the groups of f16 tensors that overflow or come near, each with the exponent that makes it fit, the first one first.

    Args:
        graph: captured in f16.
        largest: magnitude of each tensor, by name; see `magnitudes`.
        fixed: see `fixed_tensors`.
    """
    ties = _Ties()
    masked: set[str] = set()
    learned = _reached(graph, (parameter.name for parameter in graph.parameters))
    for op in graph.ops:
        if operator_name(op) in _MASKING and any(isinstance(each, float) and abs(each) >= _MASKS for each in op.args):
            masked.update(result.name for result in float_results(op))
        if not keeps_one_scale(op):
            continue
        operands = scaled_operands(op)
        tied = [tensor.name for tensor in (*operands, *float_results(op)) if tensor.name not in fixed]
        for name in tied[1:]:
            ties.tie(tied[0], name)
        given = (tensor.name for tensor in operands if tensor.name in fixed and tensor.name not in learned)
        if tied and any(largest.get(name, 0.0) >= _MASKS for name in given):
            masked.add(tied[0])
    makers = graph.producers()
    interface = {variable.name for variable in (*graph.inputs, *graph.outputs)}
    hidden = {ties.group_of(name) for name in masked}
    groups = []
    for root, names in ties.groups(_narrow_results(graph, fixed)):
        top = max(names, key=lambda name: largest.get(name, 0.0))
        exponent = _exponent(largest.get(top, 0.0))
        if not exponent or root in hidden:
            continue
        members = ties.members(root)
        obstacle = "it is an input or an output of the graph" if members & interface else ""
        maker = makers.get(top)
        where = maker.module_path if maker is not None else top
        groups.append(ScaleGroup(members, largest[top], where, 0 if obstacle else exponent, obstacle))
    return tuple(groups)


def _narrow_results(graph: TorchModuleIRGraph, fixed: frozenset[str]) -> Iterator[str]:
    """Yield what f16 would hold, results that are not fixed in the order in which they are made."""
    for op in graph.ops:
        for variable in float_results(op):
            if variable.dtype is torch.float16 and variable.name not in fixed:
                yield variable.name
    for variable in graph.inputs:
        if variable.dtype is torch.float16:
            yield variable.name


def _exponent(largest: float) -> int:
    """Return the largest exponent, at most 0, under which a value has its headroom in f16."""
    if not math.isfinite(largest) or largest * HEADROOM <= F16_LIMIT:
        return 0
    return math.floor(math.log2(F16_LIMIT / (HEADROOM * largest)))


@dataclass
class _Ties:
    """Disjoint sets of names (Tarjan 1975, with path halving).

    Attributes:
        parents: name -> another of its set; the root is its own.
    """

    parents: dict[str, str] = field(default_factory=dict)

    def group_of(self, name: str) -> str:
        """Return the name that stands for a name's set."""
        parents = self.parents
        while parents.setdefault(name, name) != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    def tie(self, left: str, right: str) -> None:
        """Make one set of two."""
        self.parents[self.group_of(left)] = self.group_of(right)

    def members(self, root: str) -> frozenset[str]:
        """Return a set."""
        return frozenset(name for name in [root, *self.parents] if self.group_of(name) == root)

    def groups(self, names: Iterator[str]) -> list[tuple[str, list[str]]]:
        """Return the sets that some names are in, and which names those are."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self.group_of(name), []).append(name)
        return list(found.items())


__all__ = [
    "F16_LIMIT",
    "HEADROOM",
    "ScaleGroup",
    "fixed_tensors",
    "float_results",
    "floats_of",
    "is_float",
    "keeps_one_scale",
    "operator_name",
    "scale_groups",
    "scaled_operands",
]

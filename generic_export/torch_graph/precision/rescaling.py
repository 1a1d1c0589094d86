"""Tensors kept times a power of two, so that what f16 does not hold fits it: the same mantissas, bit for bit.

In: a captured f16 graph and the magnitudes of its tensors. Out: the graph in which groups of tensors that overflow are kept
smaller, and the factors for the parameters that feed or read them. RMS and layer norms do not change when their input is divided
by s and their epsilon by s^2; products take the factor into a weight; what can do neither gets its input multiplied back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from generic_export.torch_graph.fusion import GraphView, apply_fusions
from generic_export.torch_graph.ir import TensorKind, TensorVariable, TorchModuleIRGraph, TorchOp
from generic_export.torch_graph.precision.f32_regions import with_f32_regions
from generic_export.torch_graph.precision.scale_boundaries import cut_off, name_inside, with_tensors
from generic_export.torch_graph.precision.scale_groups import (
    F16_LIMIT,
    HEADROOM,
    ScaleGroup,
    fixed_tensors,
    float_results,
    floats_of,
    is_float,
    keeps_one_scale,
    operator_name,
    scale_groups,
    scaled_operands,
)

aten = torch.ops.aten

_NUMBERS = ("other", "self")  # names of the arguments whose numbers are values, where an operator keeps one scale
_ADDS = frozenset({"aten::add", "aten::sub", "aten::where", "aten::maximum", "aten::minimum"})
_NORMS = frozenset({"aten::rms_norm", "aten::layer_norm"})


@dataclass(frozen=True)
class _Product:
    """Which arguments of an operator are multiplied with each other.

    Attributes:
        data, weight: names in the schema; `data` is "" where the result is linear in the weight alone.
        bias: what is added to the product, or "".
        swaps: either of the two may be the weight.
        divides: the weight divides.
    """

    data: str
    weight: str
    bias: str = ""
    swaps: bool = False
    divides: bool = False


_PRODUCTS: Mapping[str, _Product] = {
    "aten::linear": _Product("input", "weight", "bias"),
    "aten::addmm": _Product("mat1", "mat2", "self"),
    "aten::mm": _Product("self", "mat2", swaps=True),
    "aten::bmm": _Product("self", "mat2", swaps=True),
    "aten::matmul": _Product("self", "other", swaps=True),
    "aten::mul": _Product("self", "other", swaps=True),
    "aten::div": _Product("self", "other", divides=True),
    "aten::conv1d": _Product("input", "weight", "bias"),
    "aten::conv2d": _Product("input", "weight", "bias"),
    "aten::embedding": _Product("", "weight"),
    "t2n::grouped_linear": _Product("input", "weight"),
    "t2n::experts": _Product("", "down", "down_bias"),
}


@dataclass(frozen=True)
class Rescaling:
    """A graph that fits f16, as far as that can be had.

    Attributes:
        graph: computes the same.
        factors: what the values of a parameter are to be multiplied with, by name; powers of two.
        groups: the tensors that overflow or come near; `ScaleGroup.obstacle` says what could not be rescaled.
    """

    graph: TorchModuleIRGraph
    factors: Mapping[str, float]
    groups: tuple[ScaleGroup, ...]


def rescaled(graph: TorchModuleIRGraph, largest: Mapping[str, float]) -> Rescaling:
    """Keep tensors times a power of two where f16 does not hold them, eight times their measured size included.

    Args:
        graph: captured in f16.
        largest: magnitude of each tensor on typical inputs, by name (see `magnitudes.measured`).
    """
    graph, largest = _cut_where_handed_over(graph, largest)
    fixed = fixed_tensors(graph)
    groups = scale_groups(graph, largest, fixed)
    while True:
        exponents = {name: group.exponent for group in groups if group.exponent for name in group.tensors}
        if not exponents:
            return Rescaling(graph, {}, groups)
        walk = _Walk(graph, exponents, fixed, largest)
        try:
            for op in graph.ops:
                walk.rewrite(op)
        except _Obstacle as obstacle:
            groups = tuple(obstacle.noted(group) for group in groups)
        else:
            return Rescaling(replace(graph, ops=tuple(walk.ops)), walk.factors, groups)


def _cut_where_handed_over(
    graph: TorchModuleIRGraph, largest: Mapping[str, float]
) -> tuple[TorchModuleIRGraph, Mapping[str, float]]:
    """Return the graph with a place for a factor where a stream that is to be kept smaller enters or leaves it as it is."""
    interface = {each.name for each in graph.inputs} ^ {each.name for each in graph.outputs}
    cut = {
        name
        for group in scale_groups(graph, largest, fixed_tensors(graph))
        for name in group.tensors & interface
        if largest.get(name, math.inf) * (1 if group.overflows else HEADROOM) <= F16_LIMIT
    }
    if not cut:
        return graph, largest
    return cut_off(graph, cut), {**largest, **{name_inside(name): largest[name] for name in cut}}


def without_overflow_guards(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Return the graph without what transformers writes so that training in f16 goes on: values cut where f16 ends.

    A graph whose values fit computes the same without: clamp(x, -limit, limit), where the limit depends on isinf(x).
    """
    return apply_fusions(graph, [_drop_overflow_guard])


def _drop_overflow_guard(view: GraphView, root: TorchOp) -> TorchOp | None:
    if root.target is not aten.clamp.Tensor or len(root.args) != 3:
        return None
    source, limit = root.args[0], view.made_by(root.args[2], aten.where.Scalar)
    found = view.made_by(limit.args[0], aten.any.default) if limit is not None else None
    infinite = view.made_by(found.args[0], aten.isinf.default) if found is not None else None
    if infinite is None or limit is None or infinite.args[0] != source or min(limit.args[1:]) < F16_LIMIT - 1000:
        return None
    return replace(root, target=aten.alias.default, args=(source,), kwargs={})


class _Obstacle(Exception):  # noqa: N818 - control flow, never seen by a caller
    """A tensor cannot be rescaled, since something reads or makes it as it is."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def noted(self, group: ScaleGroup) -> ScaleGroup:
        """Return the group without its exponent, if it is the tensor's."""
        return replace(group, exponent=0, obstacle=self.reason) if self.name in group.tensors else group


@dataclass
class _Walk:
    """Walks the operators once, in order.

    Attributes:
        graph: as captured.
        exponents: of the tensors that are kept times a power of two, by name.
        fixed, largest: see `rescaled`.
        ops: what is written so far.
        factors: of parameters.
        multiplied: (name, exponent) -> the product that is there already.
    """

    graph: TorchModuleIRGraph
    exponents: Mapping[str, int]
    fixed: frozenset[str]
    largest: Mapping[str, float]
    ops: list[TorchOp] = field(default_factory=list)
    factors: dict[str, float] = field(default_factory=dict)
    multiplied: dict[tuple[str, int], TensorVariable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._uses = self.graph.use_counts()
        self._makers = self.graph.producers()
        self._taken = {*self._uses, *self._makers}

    def rewrite(self, op: TorchOp) -> None:
        """Write what stands for an operator."""
        name = operator_name(op)
        if not any(self._exponent(tensor) for tensor in (*floats_of(op), *float_results(op))):
            self.ops.append(op)
        elif keeps_one_scale(op) and float_results(op) and not _adds_a_size(op, name):
            self._one_scale(op, name)
        elif name in _NORMS:
            self._norm(op)
        elif name in _PRODUCTS and op.arguments().get("rounding_mode") is None:
            self._product(op, _PRODUCTS[name])
        else:
            self._as_it_was(op)

    # --- the kinds of operator -----------------------------------------------------------------------

    def _one_scale(self, op: TorchOp, name: str) -> None:
        exponent = next(self._exponent(result) for result in float_results(op))
        fixed = [tensor for tensor in scaled_operands(op) if tensor.name in self.fixed]
        swapped = {tensor.name: self._times(tensor, exponent, op) for tensor in fixed}
        op = with_tensors(op, swapped)
        if name in _ADDS:
            numbers = {key: value for key, value in op.arguments().items() if key in _NUMBERS and _is_number(value)}
            op = op.with_arguments({key: float(value) * 2.0**exponent for key, value in numbers.items()})
        self.ops.append(op)

    def _norm(self, op: TorchOp) -> None:
        given = op.arguments()
        before, after = self._exponent(given["input"]), self._exponent(op.output)
        epsilon = given.get("eps")
        if epsilon is None:
            epsilon = torch.finfo(given["input"].dtype).eps if op.target is aten.rms_norm.default else 1e-5
        changes: dict[str, Any] = {"eps": epsilon * 4.0**before}
        weighted = given.get("weight") is not None
        for name in ("weight", "bias"):
            if given.get(name) is not None:
                changes[name] = self._times(given[name], after if weighted else 0, op)
        self._write(op.with_arguments(changes), 0 if weighted else after)

    def _product(self, op: TorchOp, roles: _Product) -> None:
        given = op.arguments()
        after = self._exponent(op.output)
        name, data_name = roles.weight, roles.data
        if roles.swaps and self._is_fixed(given[data_name]):
            name, data_name = data_name, name
        data, weight = given.get(data_name), given[name]
        if not roles.data:
            op = self._restored(op)
        before = self._exponent(data)
        if is_float(weight) and not self._is_fixed(weight):
            self._product_of_results(op, data_name, name, -1 if roles.divides else 1)
            return
        missing = after - before
        taken = self._taken_by_weight(weight, -missing if roles.divides else missing, op)
        at_output = 0
        if taken is not None:
            op = op.with_arguments({name: taken})
        elif missing < 0 and isinstance(data, TensorVariable):
            op = op.with_arguments({data_name: self._multiplied(data, missing, op)})
        else:
            at_output = missing
        bias = given.get(roles.bias)
        if bias is not None:
            op = op.with_arguments({roles.bias: self._times(bias, after - at_output, op)})
        self._write(op, at_output)

    def _product_of_results(self, op: TorchOp, left: str, right: str, sign: int) -> None:
        """Two tensors that both depend on the inputs: what the exponents lack is made up at the larger one, or behind."""
        given = op.arguments()
        missing = self._exponent(op.output) - self._exponent(given[left]) - sign * self._exponent(given[right])
        if missing >= 0:
            self._write(op, missing)
            return
        larger = left if sign < 0 or self._size(given[left]) >= self._size(given[right]) else right
        self.ops.append(op.with_arguments({larger: self._multiplied(given[larger], missing, op)}))

    def _as_it_was(self, op: TorchOp) -> None:
        """Any other operator reads and makes what it would have."""
        op = self._restored(op)
        for result in float_results(op):
            if self._exponent(result):
                self._require_range(result, f"{op.target} makes it")
        outputs = tuple(self._raw(out) if out is not None and self._exponent(out) else out for out in op.outputs)
        self.ops.append(replace(op, outputs=outputs))
        for raw, made in zip(outputs, op.outputs, strict=True):
            if raw is not None and made is not None and raw is not made:
                self.ops.append(_multiplication(op, raw, self._exponent(made), made))

    # --- pieces --------------------------------------------------------------------------------------

    def _exponent(self, value: Any) -> int:
        return self.exponents.get(value.name, 0) if isinstance(value, TensorVariable) else 0

    def _is_fixed(self, value: Any) -> bool:
        return isinstance(value, TensorVariable) and value.name in self.fixed

    def _size(self, tensor: TensorVariable) -> float:
        return self.largest.get(tensor.name, 0.0)

    def _require_range(self, tensor: TensorVariable, reason: str) -> None:
        if tensor.dtype is torch.float16 and not self._size(tensor) <= F16_LIMIT:
            raise _Obstacle(tensor.name, reason)

    def _restored(self, op: TorchOp) -> TorchOp:
        """Return the operator reading its operands multiplied back."""
        swapped = {}
        for tensor in floats_of(op):
            exponent = self._exponent(tensor)
            if exponent:
                self._require_range(tensor, f"{op.target} reads it at {op.module_path or 'the root'}")
                swapped[tensor.name] = self._multiplied(tensor, -exponent, op)
        return with_tensors(op, swapped)

    def _write(self, op: TorchOp, exponent: int) -> None:
        """Write an operator of one result, and a multiplication of that result."""
        if not exponent:
            self.ops.append(op)
            return
        raw = self._raw(op.output)
        self.ops.append(replace(op, outputs=(raw,)))
        self.ops.append(_multiplication(op, raw, exponent, op.output))

    def _multiplied(self, tensor: TensorVariable, exponent: int, near: TorchOp) -> TensorVariable:
        """Return a tensor times a power of two, written once."""
        key = (tensor.name, exponent)
        if key not in self.multiplied:
            result = replace(self._raw(tensor), kind=TensorKind.RESULT)
            self.ops.append(_multiplication(near, tensor, exponent, result))
            self.multiplied[key] = result
        return self.multiplied[key]

    def _taken_by_weight(self, weight: Any, exponent: int, near: TorchOp) -> Any | None:
        """Return a fixed operand times a power of two; None for sizes, integers, and matrices read elsewhere or that overflow."""
        if not exponent:
            return weight
        if _is_number(weight):
            return float(weight) * 2.0**exponent
        if not is_float(weight):
            return None
        parameter = self._only_parameter(weight)
        if parameter is None and weight.rank > 1 and self._is_stored(weight):
            return None
        if parameter is not None and exponent > 0 and self._size(parameter) * 2.0**exponent > F16_LIMIT:
            return None
        return self._times(weight, exponent, near)

    def _times(self, tensor: TensorVariable, exponent: int, near: TorchOp) -> TensorVariable:
        """Return a fixed tensor times a power of two: a factor of the parameter where it is read here only."""
        if not exponent:
            return tensor
        parameter = self._only_parameter(tensor)
        if parameter is None:
            return self._multiplied(tensor, exponent, near)
        self.factors[parameter.name] = 2.0**exponent
        return tensor

    def _only_parameter(self, tensor: TensorVariable) -> TensorVariable | None:
        """Return the parameter that a fixed tensor is a view or a cast of, if nothing else reads it."""
        while self._uses.get(tensor.name, 0) == 1 and tensor.kind is TensorKind.RESULT:
            maker = self._makers[tensor.name]
            if not _is_view(maker):
                return None
            (tensor,) = floats_of(maker)
        single = self._uses.get(tensor.name, 0) == 1 and tensor.kind is TensorKind.PARAMETER
        return tensor if single else None

    def _is_stored(self, tensor: TensorVariable) -> bool:
        """Say whether a fixed tensor is a parameter, or views of one, not something computed from it."""
        while tensor.kind is TensorKind.RESULT:
            maker = self._makers[tensor.name]
            if not _is_view(maker):
                return False
            (tensor,) = floats_of(maker)
        return True

    def _raw(self, tensor: TensorVariable) -> TensorVariable:
        """Return a tensor like another one, under a name that is free."""
        name, number = f"{tensor.name}_scaled", 1
        while name in self._taken:
            name, number = f"{tensor.name}_scaled_{number}", number + 1
        self._taken.add(name)
        return replace(tensor, name=name)


def _multiplication(near: TorchOp, tensor: TensorVariable, exponent: int, result: TensorVariable) -> TorchOp:
    return replace(near, target=aten.mul.Tensor, args=(tensor, 2.0**exponent), kwargs={}, outputs=(result,))


def _adds_a_size(op: TorchOp, name: str) -> bool:
    """Say whether a size is one of the values that an operator adds or chooses: it cannot be multiplied."""
    return name in _ADDS and any(isinstance(op.arguments().get(key), sympy.Expr) for key in _NUMBERS)


def _is_view(op: TorchOp) -> bool:
    """Say whether an operator moves the values of one tensor, or picks some, and adds nothing to them."""
    name = operator_name(op)
    return len(floats_of(op)) == 1 and (name == "aten::embedding" or (keeps_one_scale(op) and name not in _ADDS))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# A captured graph made to fit f16: what leaves it is kept times a power of two, or in f32 where something reads it as
# it is.
# In: a captured f16 graph and the magnitudes of its tensors. Out: a graph that computes the same, and what was done.
def fitted(graph: TorchModuleIRGraph, largest: Mapping[str, float], *, f32_regions: bool = False) -> Rescaling:
    """Make a graph fit f16, with room for values eight times as large as those that were measured.

    Args:
        graph: captured in f16.
        largest: magnitude of each tensor on typical inputs, by name (see `magnitudes.measured`).
        f32_regions: keep in f32 what could be kept smaller too.
    """
    large = _large_results(graph, largest)
    kept: tuple[ScaleGroup, ...] = ()
    while True:
        names = {name for group in kept for name in group.tensors}
        found = rescaled(*with_f32_regions(graph, names, largest))
        chosen = [group for group in found.groups if f32_regions or not group.exponent]
        further = [_kept_in_f32(group, large - names) for group in chosen if group.tensors & (large - names)]
        if not further:
            return replace(found, groups=(*kept, *found.groups))
        kept += tuple(further)


def _large_results(graph: TorchModuleIRGraph, largest: Mapping[str, float]) -> set[str]:
    """Return the names of the f16 results that have no room for larger values; what others are handed stays what it is."""
    made = (result.name for op in graph.ops for result in float_results(op) if result.dtype is torch.float16)
    outputs = {output.name for output in graph.outputs}
    return {name for name in made if name not in outputs and largest.get(name, 0.0) * HEADROOM > F16_LIMIT}


def _kept_in_f32(group: ScaleGroup, large: set[str]) -> ScaleGroup:
    return replace(group, tensors=group.tensors & large, exponent=0, in_f32=True)


__all__ = ["Rescaling", "fitted", "rescaled", "without_overflow_guards"]

"""Element-wise operators: arithmetic, comparisons, logic, activations, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.ops.builder import NnefBuilder, Scalar, Value, broadcast_shape
from generic_export.ops.registry import translates

aten = torch.ops.aten

Operand: TypeAlias = Value | Scalar | sympy.Expr


def operand(b: NnefBuilder, value: Operand, dtype: torch.dtype) -> Value:
    """Return a tensor or Python number as a value of the given element type."""
    return b.cast(value, dtype) if isinstance(value, Value) else b.scalar(value, dtype)


def result_dtype(*values: Operand) -> torch.dtype:
    """Return the element type PyTorch promotes the operands to (torch.result_type, two at a time)."""
    stand_ins = [_stand_in(value) for value in values]
    result = stand_ins[0]
    for other in stand_ins[1:]:
        promoted = torch.result_type(result, other)
        rank = max(_rank(result), _rank(other))
        result = torch.empty((1,) * rank, dtype=promoted, device="meta")
    return result.dtype if isinstance(result, torch.Tensor) else torch.result_type(result, result)


def _stand_in(value: Operand) -> torch.Tensor | Scalar:
    if isinstance(value, Value):
        return torch.empty((1,) * value.rank, dtype=value.dtype, device="meta")
    return 1 if isinstance(value, sympy.Expr) else value


def _rank(value: torch.Tensor | Scalar) -> int:
    return value.ndim if isinstance(value, torch.Tensor) else 0


def _arithmetic(b: NnefBuilder, operator: str, left: Operand, right: Operand) -> Value:
    dtype = result_dtype(left, right)
    return b.binary(operator, operand(b, left, dtype), operand(b, right, dtype))


def _scaled(b: NnefBuilder, value: Operand, alpha: Scalar) -> Operand:
    if alpha == 1:
        return value
    if isinstance(value, Value):
        return _arithmetic(b, "mul", value, alpha)
    return value * alpha


@translates(aten.add.Tensor, aten.add.Scalar)
def add(b: NnefBuilder, self: Operand, other: Operand, *, alpha: Scalar = 1) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _arithmetic(b, "add", self, _scaled(b, other, alpha))


@translates(aten.sub.Tensor, aten.sub.Scalar)
def sub(b: NnefBuilder, self: Operand, other: Operand, *, alpha: Scalar = 1) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _arithmetic(b, "sub", self, _scaled(b, other, alpha))


@translates(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(b: NnefBuilder, self: Operand, other: Operand, alpha: Scalar = 1) -> Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return _arithmetic(b, "sub", other, _scaled(b, self, alpha))


@translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: NnefBuilder, self: Value, other: Operand) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    if not isinstance(other, Value) and other == 1 and self.dtype.is_floating_point:
        return self
    return _arithmetic(b, "mul", self, other)


@translates(aten.div.Tensor, aten.div.Scalar)
def div(b: NnefBuilder, self: Value, other: Operand) -> Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = result_dtype(self, other)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return b.binary("div", operand(b, self, dtype), operand(b, other, dtype))


@translates(aten.maximum.default)
def maximum(b: NnefBuilder, self: Value, other: Value) -> Value:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    return _arithmetic(b, "max", self, other)


@translates(aten.minimum.default)
def minimum(b: NnefBuilder, self: Value, other: Value) -> Value:
    """minimum(Tensor self, Tensor other) -> Tensor"""
    return _arithmetic(b, "min", self, other)


@translates(aten.clamp.default)
def clamp(b: NnefBuilder, self: Value, min: Scalar | None = None, max: Scalar | None = None) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    dtype = result_dtype(*(value for value in (self, min, max) if value is not None))
    value = b.cast(self, dtype)
    if min is not None:
        value = b.binary("max", value, operand(b, min, dtype))
    return value if max is None else b.binary("min", value, operand(b, max, dtype))


@translates(aten.pow.Tensor_Scalar)
def pow_tensor_scalar(b: NnefBuilder, self: Value, exponent: Scalar) -> Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    dtype = result_dtype(self, exponent)
    base = b.cast(self, dtype)
    if exponent == 2 and dtype.is_floating_point:
        return b.unary("square", base)
    if exponent == 0.5:
        return b.unary("sqrt", base)
    return b.binary("pow", base, operand(b, exponent, dtype))


# --- one operand ---------------------------------------------------------------------------------

# aten operator -> NNEF operator; integer input is promoted to float first, as PyTorch does.
_FLOAT_UNARY: dict[torch._ops.OpOverload, str] = {
    aten.exp.default: "exp",
    aten.log.default: "log",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.erf.default: "tract_core_erf",
    aten.reciprocal.default: "recip",
}

_SAME_DTYPE_UNARY: dict[torch._ops.OpOverload, str] = {
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.relu.default: "relu",
    aten.silu.default: "tract_core_silu",
    aten.floor.default: "floor",
    aten.ceil.default: "ceil",
    aten.round.default: "tract_core_round_even",
}


def _register_unary(overload: torch._ops.OpOverload, operator: str, *, to_float: bool) -> Callable:
    def unary(b: NnefBuilder, self: Value) -> Value:
        promote = to_float and not self.dtype.is_floating_point
        return b.unary(operator, b.cast(self, torch.get_default_dtype()) if promote else self)

    unary.__name__ = overload._schema.name.split("::")[-1]
    unary.__doc__ = str(overload._schema)
    return translates(overload)(unary)


for _overload, _operator in _FLOAT_UNARY.items():
    _register_unary(_overload, _operator, to_float=True)
for _overload, _operator in _SAME_DTYPE_UNARY.items():
    _register_unary(_overload, _operator, to_float=False)


@translates(aten.gelu.default)
def gelu(b: NnefBuilder, self: Value, *, approximate: str = "none") -> Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    if approximate == "tanh":
        attributes = {"fast_impl": False}  # facts/tract.md §3.2: fast_impl=true is x^2, not GELU
        return b.emit("tract_core_gelu_approx", [self], shape=self.shape, dtype=self.dtype, attributes=attributes)
    return b.fragment("gelu_exact", [self], shape=self.shape, dtype=self.dtype)


@translates(aten.softplus.default)
def softplus(b: NnefBuilder, self: Value, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    # facts/tract.md §3.4: tract's softplus is log(exp(x)+1), infinite for x > 88.
    scaled = _arithmetic(b, "mul", self, float(beta)) if beta != 1 else self
    limit = b.scalar(float(threshold), self.dtype)
    smooth = b.unary("softplus", b.binary("min", scaled, limit))
    if beta != 1:
        smooth = b.binary("div", smooth, b.scalar(float(beta), self.dtype))
    return b.select(b.binary("gt", scaled, limit, dtype=torch.bool), self, smooth)


# --- comparisons and logic -----------------------------------------------------------------------

_COMPARISONS = {
    "eq": (aten.eq.Tensor, aten.eq.Scalar),
    "ne": (aten.ne.Tensor, aten.ne.Scalar),
    "lt": (aten.lt.Tensor, aten.lt.Scalar),
    "le": (aten.le.Tensor, aten.le.Scalar),
    "gt": (aten.gt.Tensor, aten.gt.Scalar),
    "ge": (aten.ge.Tensor, aten.ge.Scalar),
}


def _register_comparison(operator: str, overloads: tuple) -> None:
    def comparison(b: NnefBuilder, self: Value, other: Operand) -> Value:
        dtype = result_dtype(self, other)
        if dtype is torch.bool:
            dtype = torch.int64  # facts/tract.md §2.5: comparing bool tensors fails at run
        return b.binary(operator, operand(b, self, dtype), operand(b, other, dtype), dtype=torch.bool)

    comparison.__name__ = operator
    comparison.__doc__ = str(overloads[0]._schema)
    translates(*overloads)(comparison)


for _operator, _overloads in _COMPARISONS.items():
    _register_comparison(_operator, _overloads)


@translates(aten.bitwise_and.Tensor, aten.logical_and.default)
def logical_and(b: NnefBuilder, self: Value, other: Value) -> Value:
    """logical_and(Tensor self, Tensor other) -> Tensor; bitwise_and.Tensor on bool"""
    return _logic(b, "and", self, other, neutral=True)


@translates(aten.bitwise_or.Tensor, aten.logical_or.default)
def logical_or(b: NnefBuilder, self: Value, other: Value) -> Value:
    """logical_or(Tensor self, Tensor other) -> Tensor; bitwise_or.Tensor on bool"""
    return _logic(b, "or", self, other, neutral=False)


def _logic(b: NnefBuilder, operator: str, left: Value, right: Value, *, neutral: bool) -> Value:
    shape = broadcast_shape(left.shape, right.shape)
    for first, second in ((left, right), (right, left)):
        if first.constant is neutral and second.dtype is torch.bool:
            return b.broadcast(b.align_rank(second, len(shape)), shape)
    if left.dtype is not torch.bool or right.dtype is not torch.bool:
        integer = {"and": "tract_core_bitand", "or": "tract_core_bitor"}[operator]
        return _arithmetic(b, integer, left, right)
    return b.binary(operator, left, right)


@translates(aten.bitwise_not.default, aten.logical_not.default)
def logical_not(b: NnefBuilder, self: Value) -> Value:
    """logical_not(Tensor self) -> Tensor; bitwise_not on bool"""
    if self.dtype is not torch.bool:
        return b.unary("tract_core_bitnot", self)
    return b.unary("not", self)


@translates(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(b: NnefBuilder, condition: Value, self: Operand, other: Operand) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    dtype = result_dtype(self, other)
    return b.select(condition, operand(b, self, dtype), operand(b, other, dtype))


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: NnefBuilder, self: Value, mask: Value, value: Operand) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    return b.select(mask, operand(b, value, self.dtype), self)


# --- element types -------------------------------------------------------------------------------


@translates(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default)
def to(b: NnefBuilder, self: Value, dtype: torch.dtype | None = None) -> Value:
    """to.dtype(Tensor self, ScalarType dtype, ...) -> Tensor"""
    return self if dtype is None else b.cast(self, dtype)


@translates(aten.type_as.default)
def type_as(b: NnefBuilder, self: Value, other: Value) -> Value:
    """type_as(Tensor self, Tensor other) -> Tensor"""
    return b.cast(self, other.dtype)


@translates(
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
)
def identity(b: NnefBuilder, self: Value) -> Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor: the same value"""
    return self


@translates(aten.dropout.default)
def dropout(b: NnefBuilder, input: Value, p: float, train: bool) -> Value:
    """dropout(Tensor input, float p, bool train) -> Tensor: the identity outside training"""
    if train and p > 0:
        raise TranslationError(
            "dropout is active: the module is in training mode.", "Call model.eval() before the export."
        )
    return input


__all__ = ["operand", "result_dtype"]

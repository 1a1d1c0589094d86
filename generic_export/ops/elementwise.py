"""Element-wise operators on numbers: arithmetic, powers, bounds, one-operand functions, selection, element types."""

from __future__ import annotations

from collections.abc import Callable

import torch

from generic_export.errors import TranslationError
from generic_export.ops.complex import (
    as_complex_dtype,
    complex_arithmetic,
    complex_exponential,
    magnitude,
    real_and_imaginary,
)
from generic_export.ops.variants import variant
from generic_export.translate.builder import NnefBuilder, Scalar, Value
from generic_export.translate.complex_layout import COMPONENT_DTYPES, as_complex, as_pairs
from generic_export.translate.operands import Operand, floating, operand, result_dtype
from generic_export.translate.registry import translates

aten = torch.ops.aten

# What arithmetic means on bool tensors: tract has no arithmetic kernel for them.
_BOOL_OPERATORS = {"add": "or", "mul": "and", "max": "or", "min": "and"}


def arithmetic(b: NnefBuilder, operator: str, left: Operand | complex, right: Operand | complex) -> Value:
    """Emit a two-operand operation in the element type that PyTorch promotes its operands to."""
    dtype = result_dtype(left, right)
    if dtype.is_complex:
        return complex_arithmetic(b, operator, left, right, dtype)
    assert not isinstance(left, complex) and not isinstance(right, complex)
    operands = operand(b, left, dtype), operand(b, right, dtype)
    return b.binary(_BOOL_OPERATORS.get(operator, operator) if dtype is torch.bool else operator, *operands)


def _scaled(b: NnefBuilder, value: Operand, alpha: Scalar) -> Operand:
    if alpha == 1:
        return value
    if isinstance(value, Value):
        return arithmetic(b, "mul", value, alpha)
    return value * alpha


@variant(aten.add.Tensor, aten.add.Scalar, operator="add")
@variant(aten.sub.Tensor, aten.sub.Scalar, operator="sub")
def add(b: NnefBuilder, self: Operand, other: Operand, *, alpha: Scalar = 1, operator: str) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return arithmetic(b, operator, self, _scaled(b, other, alpha))


@translates(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(b: NnefBuilder, self: Operand, other: Operand, alpha: Scalar = 1) -> Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return arithmetic(b, "sub", other, _scaled(b, self, alpha))


@translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: NnefBuilder, self: Value, other: Operand) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    if not isinstance(other, Value) and other == 1 and self.dtype.is_floating_point:
        return self
    return arithmetic(b, "mul", self, other)


@translates(aten.div.Tensor, aten.div.Scalar)
def div(b: NnefBuilder, self: Value, other: Operand) -> Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = result_dtype(self, other)
    if dtype.is_complex:
        return complex_arithmetic(b, "div", self, other, dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return b.binary("div", operand(b, self, dtype), operand(b, other, dtype))


@variant(aten.maximum.default, operator="max")
@variant(aten.minimum.default, operator="min")
def maximum(b: NnefBuilder, self: Value, other: Value, *, operator: str) -> Value:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    return arithmetic(b, operator, self, other)


@variant(aten.fmax.default, operator="max")
@variant(aten.fmin.default, operator="min")
def fmax(b: NnefBuilder, self: Value, other: Value, *, operator: str) -> Value:
    """fmax(Tensor self, Tensor other) -> Tensor"""
    dtype = result_dtype(self, other)
    first, second = b.cast(self, dtype), b.cast(other, dtype)
    extremum = b.binary(_BOOL_OPERATORS[operator] if dtype is torch.bool else operator, first, second)
    if not dtype.is_floating_point:
        return extremum
    # tract's vector kernels answer one operand or the other when one of them is NaN.
    return b.select(isnan(b, first), second, b.select(isnan(b, second), first, extremum))


@variant(aten.clamp_min.default, aten.clamp_min.Tensor, max=None)
@variant(aten.clamp_max.default, aten.clamp_max.Tensor, min=None)
@translates(aten.clamp.default, aten.clamp.Tensor)
def clamp(b: NnefBuilder, self: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    dtype = result_dtype(*(value for value in (self, min, max) if value is not None))
    value = b.cast(self, dtype)
    for operator, bound in (("max", min), ("min", max)):
        if bound is not None:
            value = b.binary(operator, value, operand(b, bound, dtype))
    return value


# --- powers --------------------------------------------------------------------------------------


@translates(aten.pow.Tensor_Scalar)
def pow_tensor_scalar(b: NnefBuilder, self: Value, exponent: Scalar) -> Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    dtype = result_dtype(self, exponent)
    if dtype.is_complex:
        return _repeated_product(b, as_complex_dtype(b, self, dtype), exponent)
    base = b.cast(self, dtype)
    if not dtype.is_floating_point:
        return _repeated_product(b, base, exponent)
    if exponent == 0:
        return b.full(self.shape, 1.0, dtype)
    if exponent == 1:
        return base
    if exponent == 2:
        return b.unary("square", base)
    if exponent == 0.5:
        return b.unary("sqrt", base)
    return b.binary("pow", base, operand(b, exponent, dtype))


def _repeated_product(b: NnefBuilder, base: Value, exponent: Scalar | complex) -> Value:
    """Return an integer or complex power: tract's pow is for floats only (docs/contributing/engine-facts.md#typing-rules)."""
    if not isinstance(exponent, int) or exponent < 0:
        raise TranslationError(f"pow of {base.dtype} with the exponent {exponent} has no NNEF form.")
    result: Value | None = None
    square = base
    for bit in reversed(f"{exponent:b}"):
        if bit == "1":
            result = square if result is None else arithmetic(b, "mul", result, square)
        square = arithmetic(b, "mul", square, square)
    return result if result is not None else b.full(base.shape, 1, base.dtype)


@translates(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(b: NnefBuilder, self: Operand, exponent: Value) -> Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    dtype = result_dtype(self, exponent)
    if dtype.is_floating_point:
        return b.binary("pow", operand(b, self, dtype), operand(b, exponent, dtype))
    # tract: Pow has kernels for i32 and i64 only, and reads the exponent as unsigned.
    zero, one = b.scalar(0, torch.int64), b.scalar(1, torch.int64)
    base, power = (b.materialised(operand(b, value, torch.int64)) for value in (self, exponent))
    raised = b.binary("pow", base, b.binary("max", power, zero))
    sign = b.binary("pow", base, b.binary("tract_core_bitand", power, one))
    is_unit = b.binary("eq", b.unary("abs", base), one, dtype=torch.bool)
    negative = b.binary("lt", power, zero, dtype=torch.bool)
    # PyTorch: a negative integer exponent gives 0, but for the bases 1 and -1.
    return b.cast(b.select(negative, b.select(is_unit, sign, zero), raised), dtype)


# --- one operand ---------------------------------------------------------------------------------

# What both call by one name; integer input is promoted to float first, as PyTorch does.
_SAME_NAME = "exp log sin cos tan asin acos atan sinh cosh asinh acosh atanh tanh sqrt rsqrt"

# On complex numbers only these of them have a form.
_COMPLEX_UNARY: dict[str, Callable[[NnefBuilder, Value], Value]] = {"exp": complex_exponential}

# tract: no f64 kernel.
_F32_AT_MOST = frozenset({"tract_core_erf"})


@variant(aten.reciprocal.default, operator="recip")
@variant(aten.erf.default, operator="tract_core_erf")
def float_unary(b: NnefBuilder, self: Value, *, operator: str) -> Value:
    """Emit an operation of one float operand, in a type that tract has a kernel for."""
    if self.dtype.is_complex and operator in _COMPLEX_UNARY:
        return _COMPLEX_UNARY[operator](b, self)
    value = floating(b, self)
    narrow = b.cast(value, torch.float32) if operator in _F32_AT_MOST and value.dtype is torch.float64 else value
    return b.cast(b.unary(operator, narrow), value.dtype)


for _name in _SAME_NAME.split():
    variant(getattr(aten, _name).default, operator=_name)(float_unary)


@translates(aten.neg.default)
def neg(b: NnefBuilder, self: Value) -> Value:
    """neg(Tensor self) -> Tensor"""
    if self.dtype.is_signed:
        return b.unary("neg", self)
    # tract has no unsigned kernel, and answers 0 without a word.
    return b.cast(b.unary("neg", b.cast(self, torch.int64)), self.dtype)


@translates(aten.abs.default)
def abs_default(b: NnefBuilder, self: Value) -> Value:
    """abs(Tensor self) -> Tensor"""
    return magnitude(b, self) if self.dtype.is_complex else b.unary("abs", self)


@translates(aten.sign.default)
def sign(b: NnefBuilder, self: Value) -> Value:
    """sign(Tensor self) -> Tensor"""
    return self if self.dtype is torch.bool else b.unary("sign", self)


@translates(aten.signbit.default)
def signbit(b: NnefBuilder, self: Value) -> Value:
    """signbit(Tensor self) -> Tensor"""
    if self.dtype is torch.bool:
        return b.full(self.shape, False, torch.bool)
    zero = operand(b, 0, self.dtype)
    if self.dtype.is_floating_point:
        # Only its reciprocal shows the sign of -0.0.
        is_zero = b.binary("eq", self, zero, dtype=torch.bool)
        self = b.select(is_zero, b.unary("recip", self), self)
    return b.binary("lt", self, zero, dtype=torch.bool)


@translates(aten.square.default)
def square(b: NnefBuilder, self: Value) -> Value:
    """square(Tensor self) -> Tensor"""
    return b.unary("square", self) if self.dtype.is_floating_point else arithmetic(b, "mul", self, self)


@variant(aten.log2.default, factor=1.4426950408889634)
@variant(aten.log10.default, factor=0.4342944819032518)
def log_to_base(b: NnefBuilder, self: Value, *, factor: float) -> Value:
    """log2(Tensor self) -> Tensor: exact at powers of the base, since it is computed in f64 and rounded once"""
    value = floating(b, self)
    wide = b.unary("log", b.cast(value, torch.float64))
    return b.cast(b.binary("mul", wide, b.scalar(factor, torch.float64)), value.dtype)


@translates(aten.isnan.default)
def isnan(b: NnefBuilder, self: Value) -> Value:
    """isnan(Tensor self) -> Tensor"""
    if not self.dtype.is_floating_point:
        return b.full(self.shape, False, torch.bool)
    narrow = b.cast(self, torch.float32) if self.dtype is torch.float64 else self  # tract: no f64 kernel
    return b.unary("tract_core_is_nan", narrow, dtype=torch.bool)


@translates(aten.isinf.default)
def isinf(b: NnefBuilder, self: Value) -> Value:
    """isinf(Tensor self) -> Tensor"""
    return equals_infinity(b, b.unary("abs", self) if self.dtype.is_floating_point else self, infinity=torch.inf)


@variant(aten.isposinf.default, infinity=torch.inf)
@variant(aten.isneginf.default, infinity=-torch.inf)
def equals_infinity(b: NnefBuilder, self: Value, *, infinity: float) -> Value:
    """isposinf(Tensor self) -> Tensor"""
    if not self.dtype.is_floating_point:
        return b.full(self.shape, False, torch.bool)
    return b.binary("eq", self, b.scalar(infinity, self.dtype), dtype=torch.bool)


# --- selection -----------------------------------------------------------------------------------


def select_of(b: NnefBuilder, condition: Value, if_true: Operand, if_false: Operand, dtype: torch.dtype) -> Value:
    """Choose element by element, in the given element type (complex included)."""
    chosen = b.cast(condition, torch.bool)
    if not dtype.is_complex:
        return b.select(chosen, operand(b, if_true, dtype), operand(b, if_false, dtype))
    branches = [as_complex_dtype(b, value, dtype) for value in (if_true, if_false)]
    rank = max(chosen.rank, *(value.rank for value in branches))
    pairs = [as_pairs(b.align_rank(value, rank)) for value in branches]
    return as_complex(b.select(b.unsqueeze(b.align_rank(chosen, rank), [rank]), *pairs))


@translates(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(b: NnefBuilder, condition: Value, self: Operand, other: Operand) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    return select_of(b, condition, self, other, result_dtype(self, other))


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: NnefBuilder, self: Value, mask: Value, value: Operand) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    return select_of(b, mask, value, self, self.dtype)


# --- element types -------------------------------------------------------------------------------


def converted(b: NnefBuilder, value: Value, dtype: torch.dtype) -> Value:
    """Convert to any element type, complex included."""
    if dtype.is_complex:
        return value if value.dtype is dtype else as_complex_dtype(b, value, dtype)
    if value.dtype.is_complex:
        value = real_and_imaginary(b, value, COMPONENT_DTYPES[value.dtype])[0]
    return b.cast(value, dtype)


@translates(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default)
def to(b: NnefBuilder, self: Value, dtype: torch.dtype | None = None) -> Value:
    """to.dtype(Tensor self, ScalarType dtype, ...) -> Tensor"""
    return self if dtype is None else converted(b, self, dtype)


@translates(aten.type_as.default, aten.to.other)
def type_as(b: NnefBuilder, self: Value, other: Value) -> Value:
    """type_as(Tensor self, Tensor other) -> Tensor"""
    return converted(b, self, other.dtype)


@translates(
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    # conjugation is never lazy here
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def identity(b: NnefBuilder, self: Value) -> Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor: the same value"""
    return self


@translates(
    aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default
)
def dropout(b: NnefBuilder, input: Value, p: float, train: bool) -> Value:
    """dropout(Tensor input, float p, bool train) -> Tensor: the identity outside training"""
    if train and p > 0:
        raise TranslationError(
            "dropout is active: the module is in training mode.", "Call model.eval() before the export."
        )
    return input


__all__ = ["arithmetic", "converted", "isnan", "operand", "result_dtype", "select_of"]

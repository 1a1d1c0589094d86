"""Complex numbers, carried as pairs on a trailing axis of 2 (see complex_layout): views, arithmetic, parts."""

from __future__ import annotations

import torch

from generic_export.errors import TranslationError
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.translate.builder import NnefBuilder, Value, broadcast_shape
from generic_export.translate.complex_layout import COMPONENT_DTYPES, as_complex, as_pairs
from generic_export.translate.operands import Operand
from generic_export.translate.registry import translates

aten = torch.ops.aten


def real_and_imaginary(b: NnefBuilder, value: Operand | complex, dtype: torch.dtype) -> tuple[Value, Value | None]:
    """Return both parts of an operand in a float type; the imaginary one is None when the operand is real."""
    if isinstance(value, Value) and value.dtype in COMPONENT_DTYPES:
        pairs = b.cast(as_pairs(value), dtype)
        axis = pairs.rank - 1
        real, imaginary = (b.squeeze(b.slice(pairs, axis, part, part + 1), [axis]) for part in (0, 1))
        return real, imaginary
    if isinstance(value, Value):
        return b.cast(value, dtype), None
    if isinstance(value, complex):
        return b.scalar(value.real, dtype), b.scalar(value.imag, dtype)
    return b.scalar(value, dtype), None


def both_parts(b: NnefBuilder, value: Value) -> tuple[Value, Value]:
    """Return the real and the imaginary part of a complex value."""
    real, imaginary = real_and_imaginary(b, value, COMPONENT_DTYPES[value.dtype])
    assert imaginary is not None
    return real, imaginary


def complex_of(b: NnefBuilder, real: Value, imaginary: Value) -> Value:
    """Return the complex value of two parts, broadcast against each other."""
    shape = broadcast_shape(real.shape, imaginary.shape)
    parts = [b.broadcast(b.align_rank(b.materialised(part), len(shape)), shape) for part in (real, imaginary)]
    return as_complex(b.concat([b.unsqueeze(part, [len(shape)]) for part in parts], len(shape)))


def as_complex_dtype(b: NnefBuilder, value: Operand | complex, dtype: torch.dtype) -> Value:
    """Return an operand as a complex value of the given type."""
    component = COMPONENT_DTYPES[dtype]
    if isinstance(value, Value) and value.dtype in COMPONENT_DTYPES:
        return as_complex(b.cast(as_pairs(value), component))
    real, imaginary = real_and_imaginary(b, value, component)
    return complex_of(b, real, imaginary if imaginary is not None else b.scalar(0.0, component))


def _scaled(b: NnefBuilder, operator: str, value: Value, factor: Value) -> Value:
    """Multiply or divide both parts by a real factor."""
    rank = max(value.rank, factor.rank)
    pairs = as_pairs(b.align_rank(value, rank))
    real = factor if factor.literal else b.unsqueeze(b.align_rank(factor, rank), [rank])
    return as_complex(b.binary(operator, pairs, real))


def complex_arithmetic(
    b: NnefBuilder, operator: str, left: Operand | complex, right: Operand | complex, dtype: torch.dtype
) -> Value:
    """Add, subtract, multiply or divide two operands, one of which is complex, into a complex type."""
    component = COMPONENT_DTYPES[dtype]
    (a, c), (x, y) = real_and_imaginary(b, left, component), real_and_imaginary(b, right, component)
    if operator in ("add", "sub"):
        first, second = as_complex_dtype(b, left, dtype), as_complex_dtype(b, right, dtype)
        rank = max(first.rank, second.rank)
        pairs = [as_pairs(b.align_rank(value, rank)) for value in (first, second)]
        return as_complex(b.binary(operator, *pairs))
    if y is None and c is not None:
        return _scaled(b, operator, as_complex_dtype(b, left, dtype), x)
    if operator == "mul" and c is None and y is not None:
        return _scaled(b, operator, as_complex_dtype(b, right, dtype), a)
    if y is None:
        return as_complex_dtype(b, b.binary(operator, a, x), dtype)
    c = c if c is not None else b.scalar(0.0, component)
    if operator == "mul":
        return complex_of(b, _cross(b, "sub", (a, x), (c, y)), _cross(b, "add", (a, y), (c, x)))
    if operator == "div":
        product = complex_of(b, _cross(b, "add", (a, x), (c, y)), _cross(b, "sub", (c, x), (a, y)))
        return _scaled(b, "div", product, _cross(b, "add", (x, x), (y, y)))
    raise TranslationError(f"{operator} is not supported for complex numbers (tract has no complex dtype).")


def _cross(b: NnefBuilder, operator: str, first: tuple[Value, Value], second: tuple[Value, Value]) -> Value:
    return b.binary(operator, b.binary("mul", *first), b.binary("mul", *second))


def magnitude(b: NnefBuilder, value: Value) -> Value:
    """Return the absolute value of a complex value."""
    squares = b.unary("square", as_pairs(value))
    return b.unary("sqrt", b.reduce("sum_reduce", squares, [value.rank], keepdim=False))


def complex_exponential(b: NnefBuilder, value: Value) -> Value:
    """Return exp of a complex value."""
    real, imaginary = both_parts(b, value)
    turns = complex_of(b, b.unary("cos", imaginary), b.unary("sin", imaginary))
    return _scaled(b, "mul", turns, b.unary("exp", real))


def complex_equal(b: NnefBuilder, left: Value, right: Value) -> Value:
    """Return where two complex values are equal in both parts."""
    rank = max(left.rank, right.rank)
    pairs = [as_pairs(b.align_rank(value, rank)) for value in (left, right)]
    both = b.cast(b.binary("eq", *pairs, dtype=torch.bool), torch.int64)
    return b.cast(b.reduce("min_reduce", both, [rank], keepdim=False), torch.bool)


# --- translations --------------------------------------------------------------------------------


@translates(aten.view_as_real.default)
def view_as_real(b: NnefBuilder, self: Value) -> Value:
    """view_as_real(Tensor(a) self) -> Tensor(a)"""
    return as_pairs(self)


@translates(aten.view_as_complex.default)
def view_as_complex(b: NnefBuilder, self: Value) -> Value:
    """view_as_complex(Tensor(a) self) -> Tensor(a)"""
    return as_complex(self)


@translates(aten.complex.default)
def complex_default(b: NnefBuilder, real: Value, imag: Value) -> Value:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    return complex_of(b, real, imag)


@translates(aten.polar.default)
def polar(b: NnefBuilder, abs: Value, angle: Value) -> Value:
    """polar(Tensor abs, Tensor angle) -> Tensor"""
    parts = [b.binary("mul", abs, b.unary(name, angle)) for name in ("cos", "sin")]
    return complex_of(b, *parts)


@translates(aten.real.default)
def real(b: NnefBuilder, self: Value) -> Value:
    """real(Tensor(a) self) -> Tensor(a)"""
    return both_parts(b, self)[0] if self.dtype.is_complex else self


@translates(aten.imag.default)
def imag(b: NnefBuilder, self: Value) -> Value:
    """imag(Tensor(a) self) -> Tensor(a)"""
    return both_parts(b, self)[1]


@translates(aten._conj.default, aten.conj.default, aten.conj_physical.default, aten._conj_physical.default)
def conj(b: NnefBuilder, self: Value) -> Value:
    """conj(Tensor(a) self) -> Tensor(a)"""
    if not self.dtype.is_complex:
        return self
    real_part, imaginary = both_parts(b, self)
    return complex_of(b, real_part, b.unary("neg", imaginary))


@rewrites(aten.angle.default)
def angle(self: torch.Tensor) -> torch.Tensor:
    """The argument of a complex number; pi or 0 for a real one."""
    if self.is_complex():
        pairs = torch.view_as_real(self)
        return torch.atan2(pairs[..., 1], pairs[..., 0])
    wide = self if self.is_floating_point() else self.to(torch.get_default_dtype())
    turned = torch.where(wide < 0, torch.pi, 0.0).to(wide.dtype)
    return torch.where(wide != wide, wide, turned)

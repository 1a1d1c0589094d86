"""Quotients with a rounding mode, remainders, rounding, comparisons, logic, bits and shifts.

Integer quotients use tract's integer division (towards zero); float ones are computed in f64, because tract turns `x / y`
into `x * recip(y)`, which is below the exact quotient often enough for a floor to be wrong (41 / 41 -> 0).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from generic_export.compat import OpOverload, OpOverloadPacket
from generic_export.errors import TranslationError
from generic_export.ops.complex import as_complex_dtype, complex_equal
from generic_export.ops.elementwise import div
from generic_export.ops.variants import variant
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.loops import loop
from generic_export.translate.builder import NnefBuilder, Value, broadcast_shape
from generic_export.translate.operands import Operand, operand, result_dtype
from generic_export.translate.registry import translates

aten = torch.ops.aten

Tensor = torch.Tensor


# --- quotients and remainders --------------------------------------------------------------------


def _integer_quotient(b: NnefBuilder, left: Value, right: Value) -> tuple[Value, Value]:
    """Return the quotient rounded down and the remainder, which has the divisor's sign."""
    quotient = b.binary("div", left, right)
    rest = b.binary("sub", left, b.binary("mul", quotient, right))
    if not left.dtype.is_signed:
        return quotient, rest
    zero, one = b.scalar(0, left.dtype), b.scalar(1, left.dtype)
    below = [b.binary("lt", value, zero, dtype=torch.bool) for value in (rest, right)]
    inexact = b.binary("ne", rest, zero, dtype=torch.bool)
    adjusted = b.binary("and", inexact, b.binary("tract_core_xor", *below))
    return (
        b.binary("sub", quotient, b.select(adjusted, one, zero)),
        b.binary("add", rest, b.select(adjusted, right, zero)),
    )


def _float_quotient(b: NnefBuilder, left: Value, right: Value) -> tuple[Value, Value]:
    """Return the quotient rounded down and the remainder in f64: exact for f32 operands up to a quotient of 2^29."""
    x, y = b.cast(left, torch.float64), b.cast(right, torch.float64)
    zero, one = b.scalar(0.0, torch.float64), b.scalar(1.0, torch.float64)
    quotient = b.unary("floor", b.binary("div", x, y))
    excess = b.binary("mul", b.binary("sub", x, b.binary("mul", quotient, y)), b.unary("sign", y))
    short = b.binary("ge", excess, b.unary("abs", y), dtype=torch.bool)
    beyond = b.binary("lt", excess, zero, dtype=torch.bool)
    quotient = b.binary("add", quotient, b.select(short, one, zero))
    quotient = b.binary("sub", quotient, b.select(beyond, one, zero))
    return quotient, b.binary("sub", x, b.binary("mul", quotient, y))


def _promoted(b: NnefBuilder, left: Operand, right: Operand) -> tuple[Value, Value]:
    dtype = result_dtype(left, right)
    return b.materialised(operand(b, left, dtype)), b.materialised(operand(b, right, dtype))


def _truncated(b: NnefBuilder, value: Value) -> Value:
    if not value.dtype.is_floating_point:
        return value
    negative = b.binary("lt", value, b.scalar(0.0, value.dtype), dtype=torch.bool)
    return b.select(negative, b.unary("ceil", value), b.unary("floor", value))


@variant(aten.floor_divide.default, aten.floor_divide.Scalar, rounding_mode="floor")
@translates(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(b: NnefBuilder, self: Value, other: Operand, *, rounding_mode: str | None) -> Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    if rounding_mode is None:
        return div(b, self, other)
    left, right = _promoted(b, self, other)
    if left.dtype.is_floating_point:
        if rounding_mode == "floor":
            return b.cast(_float_quotient(b, left, right)[0], left.dtype)
        wide = b.binary("div", b.cast(left, torch.float64), b.cast(right, torch.float64))
        return _truncated(b, b.cast(wide, left.dtype))
    if rounding_mode == "floor":
        return _integer_quotient(b, left, right)[0]
    return b.binary("div", left, right)


@translates(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(b: NnefBuilder, self: Operand, other: Operand) -> Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor: with the divisor's sign"""
    left, right = _promoted(b, self, other)
    if left.dtype.is_floating_point:
        return b.cast(_float_quotient(b, left, right)[1], left.dtype)
    return _integer_quotient(b, left, right)[1]


@translates(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(b: NnefBuilder, self: Value, other: Operand) -> Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor: with the dividend's sign"""
    left, right = _promoted(b, self, other)
    if left.dtype.is_floating_point:
        magnitude = _float_quotient(b, b.unary("abs", left), b.unary("abs", right))[1]
        return b.binary("mul", b.cast(magnitude, left.dtype), b.unary("sign", left))
    return b.binary("sub", left, b.binary("mul", b.binary("div", left, right), right))


# --- rounding ------------------------------------------------------------------------------------


def _exact_quotient(b: NnefBuilder, value: Value) -> Value:
    """Return a value that is about to be rounded; a quotient is computed again in f64 (see the module's docstring)."""
    if value.dtype is not torch.float32:
        return value
    emission = b.maker_of(value)
    if emission is None or emission.operator != "div":
        return value
    sides = [replace(side) for side in emission.inputs if isinstance(side, Value)]
    return b.cast(b.binary("div", *(b.cast(side, torch.float64) for side in sides)), value.dtype)


@variant(aten.floor.default, operator="floor")
@variant(aten.ceil.default, operator="ceil")
def floor(b: NnefBuilder, self: Value, *, operator: str) -> Value:
    """floor(Tensor self) -> Tensor"""
    return b.unary(operator, _exact_quotient(b, self)) if self.dtype.is_floating_point else self


@translates(aten.trunc.default)
def trunc(b: NnefBuilder, self: Value) -> Value:
    """trunc(Tensor self) -> Tensor"""
    return _truncated(b, _exact_quotient(b, self))


def _rounded(b: NnefBuilder, value: Value) -> Value:
    """Round to the nearest integer, half to even."""
    if value.dtype is not torch.float64:
        return b.unary("tract_core_round_even", value)
    # tract: round_even has no f64 kernel, and round takes halves away from zero.
    half = b.scalar(0.5, value.dtype)
    fraction = b.binary("sub", value, b.unary("floor", value))
    even = b.binary("mul", b.unary("round", b.binary("mul", value, half)), b.scalar(2.0, value.dtype))
    return b.select(b.binary("eq", fraction, half, dtype=torch.bool), even, b.unary("round", value))


@translates(aten.round.default)
def round_default(b: NnefBuilder, self: Value) -> Value:
    """round(Tensor self) -> Tensor"""
    return _rounded(b, _exact_quotient(b, self)) if self.dtype.is_floating_point else self


@translates(aten.round.decimals)
def round_decimals(b: NnefBuilder, self: Value, *, decimals: int) -> Value:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    if not self.dtype.is_floating_point or decimals == 0:
        return round_default(b, self)
    scale = b.scalar(10.0 ** abs(decimals), torch.float64)
    first, second = ("mul", "div") if decimals > 0 else ("div", "mul")
    scaled = b.cast(b.binary(first, b.cast(self, torch.float64), scale), self.dtype)
    return b.cast(b.binary(second, b.cast(_rounded(b, scaled), torch.float64), scale), self.dtype)


# --- comparisons ---------------------------------------------------------------------------------


@variant(aten.eq.Tensor, aten.eq.Scalar, operator="eq")
@variant(aten.ne.Tensor, aten.ne.Scalar, operator="ne")
@variant(aten.lt.Tensor, aten.lt.Scalar, operator="lt")
@variant(aten.le.Tensor, aten.le.Scalar, operator="le")
@variant(aten.gt.Tensor, aten.gt.Scalar, operator="gt")
@variant(aten.ge.Tensor, aten.ge.Scalar, operator="ge")
def comparison(b: NnefBuilder, self: Value, other: Operand, *, operator: str) -> Value:
    """eq.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = result_dtype(self, other)
    if dtype.is_complex:
        equal = complex_equal(b, as_complex_dtype(b, self, dtype), as_complex_dtype(b, other, dtype))
        return equal if operator == "eq" else b.unary("not", equal)
    if dtype is torch.bool:
        dtype = torch.int64  # comparing bool tensors fails at run (docs/contributing/engine-facts.md#typing-rules)
    return b.binary(operator, operand(b, self, dtype), operand(b, other, dtype), dtype=torch.bool)


# --- logic and bits ------------------------------------------------------------------------------


def _logic(b: NnefBuilder, operator: str, left: Value, right: Value) -> Value:
    neutral = operator == "and"
    shape = broadcast_shape(left.shape, right.shape)
    for first, second in ((left, right), (right, left)):
        if operator != "tract_core_xor" and first.constant is neutral:
            return b.broadcast(b.align_rank(second, len(shape)), shape)
    return b.binary(operator, left, right)


@variant(aten.logical_and.default, operator="and")
@variant(aten.logical_or.default, operator="or")
@variant(aten.logical_xor.default, operator="tract_core_xor")
def logical(b: NnefBuilder, self: Value, other: Value, *, operator: str) -> Value:
    """logical_and(Tensor self, Tensor other) -> Tensor"""
    return _logic(b, operator, b.cast(self, torch.bool), b.cast(other, torch.bool))


def _either_a_number(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    return packet.Tensor, packet.Scalar, packet.Scalar_Tensor


@variant(*_either_a_number(aten.bitwise_and), on_bools="and", on_bits="tract_core_bitand")
@variant(*_either_a_number(aten.bitwise_or), on_bools="or", on_bits="tract_core_bitor")
@variant(*_either_a_number(aten.bitwise_xor), on_bools="tract_core_xor", on_bits="tract_core_bitxor")
def bitwise(b: NnefBuilder, self: Operand, other: Operand, *, on_bools: str, on_bits: str) -> Value:
    """bitwise_and.Tensor(Tensor self, Tensor other) -> Tensor"""
    left, right = _promoted(b, self, other)
    return _logic(b, on_bools, left, right) if left.dtype is torch.bool else b.binary(on_bits, left, right)


@translates(aten.logical_not.default)
def logical_not(b: NnefBuilder, self: Value) -> Value:
    """logical_not(Tensor self) -> Tensor"""
    return b.unary("not", b.cast(self, torch.bool))


@translates(aten.bitwise_not.default)
def bitwise_not(b: NnefBuilder, self: Value) -> Value:
    """bitwise_not(Tensor self) -> Tensor"""
    return b.unary("not" if self.dtype is torch.bool else "tract_core_bitnot", self)


@variant(
    *(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor),
    *(aten.__lshift__.Tensor, aten.__lshift__.Scalar),
    operator="tract_shl",
)
@variant(
    *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor),
    *(aten.__rshift__.Tensor, aten.__rshift__.Scalar),
    operator="tract_shr",
)
def shift(b: NnefBuilder, self: Operand, other: Operand, *, operator: str) -> Value:
    """bitwise_left_shift.Tensor(Tensor self, Tensor other) -> Tensor"""
    value, amount = _promoted(b, self, other)
    if value.dtype.is_floating_point:
        raise TranslationError("shifts of floats have no NNEF form.")
    bits = value.dtype.itemsize * 8
    zero, most = b.scalar(0, value.dtype), b.scalar(bits - 1, value.dtype)
    inside = b.binary("min", b.binary("max", amount, zero), most)
    outside = b.binary("ne", inside, amount, dtype=torch.bool)
    if operator == "tract_shl":
        return b.select(outside, zero, b.binary(operator, value, inside))
    # PyTorch: an amount out of range leaves the sign only.
    return b.binary(operator, value, b.select(outside, most, inside))


# Greatest common divisors and least common multiples: Euclid's algorithm, as many steps as an element type can need.
def _steps(dtype: torch.dtype) -> int:
    """Two neighbours among Fibonacci's numbers take longest (Lamé): as many steps as there are such numbers below the limit."""
    limits = torch.iinfo(dtype)
    smaller, larger, steps = 1, 2, 2
    while larger <= max(limits.max, -limits.min):
        smaller, larger, steps = larger, smaller + larger, steps + 1
    return steps


@rewrites(aten.gcd.default)
def gcd(self: Tensor, other: Tensor) -> Tensor:
    """The greatest common divisor; 0 of two zeros."""
    dtype = torch.promote_types(self.dtype, other.dtype)
    largest, smallest = torch.broadcast_tensors(self.to(torch.int64).abs(), other.to(torch.int64).abs())

    def step(states: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (first, second), (nothing,) = states, slices
        done = second == 0
        rest = torch.remainder(first, torch.where(done, 1, second))
        return [torch.where(done, first, second) + nothing, torch.where(done, 0, rest)], []

    (divisor, _), _ = loop(step, [largest, smallest], [torch.zeros(_steps(dtype), dtype=torch.int64)])
    return divisor.to(dtype)


@rewrites(aten.lcm.default)
def lcm(self: Tensor, other: Tensor) -> Tensor:
    """The least common multiple; 0 where either is."""
    divisor = torch.gcd(self, other)
    parts = torch.div(self, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    return (parts * other).abs()

"""Sizes used as real numbers: `x / math.sqrt(x.shape[1])`, `x.sum(1) / x.shape[1]`.

In: a sympy expression of torch.export with real-valued functions in it. Out: a float32 value of rank 0, computed in the graph
from the size that the input has at run time.
"""

from __future__ import annotations

from typing import Protocol

import sympy
import torch

from generic_export.compat import torch_sympy
from generic_export.errors import DimensionError
from generic_export.nnef.graph import DimLiteral
from generic_export.torch_graph.dims import symbols_of
from generic_export.translate.value import Emission, Scalar, Value


class Calculator(Protocol):
    """What computes (`NnefBuilder`)."""

    def scalar(self, value: Scalar | sympy.Expr, dtype: torch.dtype) -> Value: ...
    def unary(self, operator: str, value: Value) -> Value: ...
    def binary(self, operator: str, left: Value, right: Value) -> Value: ...
    def cast(self, value: Value, dtype: torch.dtype) -> Value: ...
    def maker_of(self, value: Value) -> Emission | None: ...
    def varies(self, value: Value) -> bool: ...


_UNARY = frozenset("sqrt exp log log2 sin cos tan tanh sinh cosh asin acos atan asinh".split())  # noqa: SIM905
_QUOTIENTS = (torch_sympy.FloatTrueDiv, torch_sympy.IntTrueDiv)
_POWERS = (torch_sympy.FloatPow, torch_sympy.PowByNatural, sympy.Pow)


def _unary_operator(expr: sympy.Basic) -> str | None:
    name = type(expr).__name__.removeprefix("OpaqueUnaryFn_")
    return name if name in _UNARY else None


def is_real(expr: sympy.Expr) -> bool:
    """Say whether an expression over sizes is a real number rather than a size."""
    return any(
        isinstance(part, (torch_sympy.ToFloat, torch_sympy.FloatPow, sympy.Float, *_QUOTIENTS)) or _unary_operator(part)
        for part in sympy.preorder_traversal(expr)
    )


def real_value(b: Calculator, expr: sympy.Expr) -> Value:
    """Compute `expr` in the graph.

    Args:
        b: where the operations go.
        expr: over declared symbols, see `is_real`.

    Returns:
        A float32 value of rank 0.

    Raises:
        DimensionError: a function in it has no form.
    """
    if expr.is_number:
        return b.scalar(float(expr), torch.float32)
    if not is_real(expr):
        return b.scalar(expr, torch.float32)
    if isinstance(expr, torch_sympy.ToFloat):
        return real_value(b, expr.args[0])
    operator = _unary_operator(expr)
    if operator is not None:
        return b.unary(operator, real_value(b, expr.args[0]))
    if isinstance(expr, _QUOTIENTS):
        return _folded(b, "div", expr.args)
    if isinstance(expr, _POWERS):
        return _folded(b, "pow", expr.args)
    fold = next((name for kind, name in _FOLDS.items() if isinstance(expr, kind)), None)
    if fold is None:
        raise DimensionError(
            f"size {expr} has no form in the graph ({type(expr).__name__} is not supported).",
            "Compute it from sums, products, quotients, powers and roots of sizes, or declare that axis static.",
            symbols=symbols_of(expr),
        )
    return _folded(b, fold, expr.args)


_FOLDS: dict[type, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    torch_sympy.Max: "max",
    torch_sympy.Min: "min",
    sympy.Max: "max",
    sympy.Min: "min",
}


def _folded(b: Calculator, operator: str, terms: tuple[sympy.Expr, ...]) -> Value:
    result = real_value(b, terms[0])
    for term in terms[1:]:
        result = b.binary(operator, result, real_value(b, term))
    return result


def unlike_masks(b: Calculator, operator: str, left: Value, right: Value) -> tuple[str, Value, Value]:
    """Return a product or quotient in which tract sees no size.

    It takes a size there for a mask, and notes for each operation before it at which elements that mask is not 0. Where two ways
    meet, as in residual blocks, it multiplies their notes: the load takes minutes
    (docs/contributing/engine-facts.md#sizes-taken-for-masks). It sees no size through `recip`, which it makes of
    quotients itself, but later, nor through a root.
    """
    if operator == "div" and _may_be_made_of_sizes(b, right):
        return "mul", left, b.unary("recip", right)
    if operator == "mul":
        return operator, _unlike_a_mask(b, left), _unlike_a_mask(b, right)
    return operator, left, right


def _may_be_made_of_sizes(b: Calculator, value: Value) -> bool:
    return value.dtype.is_floating_point and not (value.literal or value.rank or b.varies(value))


def _unlike_a_mask(b: Calculator, value: Value) -> Value:
    """Return a size as the root of its square, which is exact."""
    maker = b.maker_of(value)
    if not value.dtype.is_floating_point or maker is None or maker.operator != "tract_core_cast":
        return value
    if not isinstance(maker.inputs[0], DimLiteral):
        return value
    wide = b.cast(value, torch.float32) if value.dtype is torch.float16 else value  # 256 * 256 is beyond f16
    return b.cast(b.unary("sqrt", b.unary("square", wide)), value.dtype)

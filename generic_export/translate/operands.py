"""What an operator's operands are: tensors, Python numbers and sizes, promoted to one element type as PyTorch does."""

from __future__ import annotations

from typing import TypeAlias

import sympy
import torch

from generic_export.translate.builder import NnefBuilder
from generic_export.translate.real_sizes import is_real
from generic_export.translate.value import Scalar, Value

Operand: TypeAlias = Value | Scalar | sympy.Expr


def operand(b: NnefBuilder, value: Operand, dtype: torch.dtype) -> Value:
    """Return a tensor or Python number as a value of the given (real) element type."""
    return b.cast(value, dtype) if isinstance(value, Value) else b.scalar(value, dtype)


def result_dtype(*values: Operand | complex) -> torch.dtype:
    """Return the element type PyTorch promotes the operands to (torch.result_type, two at a time)."""
    stand_ins = [_stand_in(value) for value in values]
    result = stand_ins[0]
    for other in stand_ins[1:]:
        promoted = torch.result_type(result, other)
        rank = max(_rank(result), _rank(other))
        result = torch.empty((1,) * rank, dtype=promoted, device="meta")
    return result.dtype if isinstance(result, torch.Tensor) else torch.result_type(result, result)


def _stand_in(value: Operand | complex) -> torch.Tensor | Scalar | complex:
    if isinstance(value, Value):
        return torch.empty((1,) * value.rank, dtype=value.dtype, device="meta")
    if isinstance(value, sympy.Expr):
        return 1.0 if is_real(value) else 1
    return value


def _rank(value: torch.Tensor | Scalar | complex) -> int:
    return value.ndim if isinstance(value, torch.Tensor) else 0


def floating(b: NnefBuilder, value: Value) -> Value:
    """Return a value in a float type: integers and bools become the default one, as PyTorch's float functions do."""
    return value if value.dtype.is_floating_point else b.cast(value, torch.get_default_dtype())


__all__ = ["Operand", "floating", "operand", "result_dtype"]

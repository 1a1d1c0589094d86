"""`math.ceil(size / 2)` and `math.floor(size / 2 + 1)` as divisions of integers, while a module is captured.

Padding as in TensorFlow is counted so (timm's `tf_` models, NASNet). PyTorch keeps the division of floats inside the rounding: then
nothing cancels, each layer's sizes hold those of all layers before, and a capture takes minutes, then hours. Sizes are below 2^52,
where both are the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from generic_export.compat import torch_sympy

_Rounding = Callable[[torch.SymFloat], torch.SymInt]


@contextmanager
def whole_quotients() -> Iterator[None]:
    """Round quotients of sizes and numbers without floats, for the length of the block."""
    number: Any = torch.SymFloat  # its methods are made when PyTorch starts, which types do not tell
    ceil = _without_floats(number.__ceil__, lambda size, divisor: (size + (divisor - 1)) // divisor)
    floor = _without_floats(number.__floor__, lambda size, divisor: size // divisor)
    with (
        mock.patch.object(number, "__ceil__", ceil),
        mock.patch.object(number, "__floor__", floor),
    ):
        yield


def _without_floats(rounded: _Rounding, divided: Callable[[torch.SymInt, int], torch.SymInt]) -> _Rounding:
    def function(value: torch.SymFloat) -> torch.SymInt:
        constant, quotient = value.node.expr.as_coeff_Add()
        more = float(constant)  # sympy takes 1.0 and 1 for two numbers
        if not isinstance(quotient, torch_sympy.IntTrueDiv) or not more.is_integer():
            return rounded(value)
        size, divisor = quotient.args
        if not divisor.is_Integer or divisor <= 0:
            return rounded(value)
        sizes: Any = value.node.shape_env
        whole = sizes.create_symintnode(size, hint=None)
        return (whole if divisor == 1 else divided(whole, int(divisor))) + int(more)

    return function


__all__ = ["whole_quotients"]

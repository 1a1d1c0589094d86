"""Products in bfloat16 while a model learns, where the machine has fast ones."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDEST = 16  # outputs for an input: no linear of a layer has so many, a vocabulary has
_HALF_GAIN = 0.6  # of the time in f32: above that, bfloat16 is not worth its rounding


class _HalfProducts(TorchFunctionMode):
    """Linears with learned weights multiply in bfloat16; everything else, and what is added up, stays f32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear and _is_learned_inside(args):
            inputs, weight, *bias = args
            product = func(inputs.to(torch.bfloat16), weight.to(torch.bfloat16)).float()
            return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **(kwargs or {}))


def _is_learned_inside(args: Sequence[Any]) -> bool:
    """Say whether a linear's weight is learned, and is none of the head's, whose rounding the logits would show."""
    return len(args) >= 2 and args[1].requires_grad and args[1].shape[0] < _WIDEST * args[1].shape[1]


def fast_products() -> AbstractContextManager[Any]:
    """Return what makes products fast where the machine has fast ones."""
    return _HalfProducts() if _is_fast_in_half() else nullcontext()


@cache
def _is_fast_in_half() -> bool:
    """Say whether this machine multiplies bfloat16 much faster than f32."""
    plain, half = (_product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    return half < _HALF_GAIN * plain


def _product_seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(256, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - began)
    return best


__all__ = ["fast_products"]

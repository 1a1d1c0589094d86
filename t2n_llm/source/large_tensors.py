"""Large tensors made without memory while a model is built: stacks of experts are parameters whose values nobody reads.

In: code that builds an `nn.Module`. Out: the same modules; what `torch.zeros(experts, width, width)` makes is on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGE = 1 << 24
"""Elements from which a new tensor is a parameter: tables that models compute (masks, positions) are smaller."""

_CONSTRUCTORS = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})


class LargeTensorsOnMeta(TorchFunctionMode):
    """New tensors of `LARGE` elements and more are on the meta device, whatever device they are asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _CONSTRUCTORS and keywords.get("out") is None:
            shape = func(*args, **{**keywords, "device": "meta", "pin_memory": False})
            if shape.numel() >= LARGE:
                return shape
        return func(*args, **keywords)


def with_values_of_tables(build: Callable[[], Any]) -> Any:
    """Build a model without memory for large tensors, unless one of them turns out to be a table that the model computes.

    Args:
        build: gives the `nn.Module`, its parameters on the meta device.
    """
    try:
        with LargeTensorsOnMeta():
            model = build()
        if not any(buffer.is_meta for buffer in model.buffers()):
            return model
    except Exception:  # a table computed of others that have values; or a config that is at fault, which shows again
        pass
    return build()


__all__ = ["LARGE", "LargeTensorsOnMeta", "with_values_of_tables"]

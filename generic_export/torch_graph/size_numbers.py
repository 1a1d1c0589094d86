"""Numbers made of sizes that a model's code puts into a tensor for a while.

`torch.ceil(torch.as_tensor(new * length / old)).long()` asks for the number's value, which freezes the length. `SizeNumber` stands
for such a tensor during a capture: what rounds it is arithmetic on the size, slices are given the size itself, and everything else
gets a tensor filled with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Size: TypeAlias = Any  # int, float, torch.SymInt or torch.SymFloat, which have no type in common

_ROUNDING: dict[Any, Callable[[Any], Any]] = {
    torch.ceil: math.ceil,
    torch.Tensor.ceil: math.ceil,
    torch.floor: math.floor,
    torch.Tensor.floor: math.floor,
}


class SizeNumber:
    """A tensor of rank 0 that is known to be a size, or a number made of sizes."""

    def __init__(self, value: Size) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round the number itself; compute with a tensor of it otherwise."""
        if func in _ROUNDING and not kwargs and len(args) == 1:
            return cls(_ROUNDING[func](args[0].value))
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_as_tensor(self), name)

    def ceil(self) -> SizeNumber:
        """The next whole number."""
        return SizeNumber(math.ceil(self.value))

    def floor(self) -> SizeNumber:
        """The whole number before."""
        return SizeNumber(math.floor(self.value))

    def long(self) -> SizeNumber:
        """The same, without what lies behind the point."""
        return SizeNumber(math.trunc(self.value)) if isinstance(self.value, float | torch.SymFloat) else self

    int = long

    def item(self) -> Size:
        """The number."""
        return self.value


def _as_tensor(value: Any) -> Any:
    return torch.full((), value.value) if isinstance(value, SizeNumber) else value


def as_size_or_tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.as_tensor`, but for quotients of sizes."""
    if isinstance(data, torch.SymFloat) and not args and not kwargs:
        return SizeNumber(data)
    return torch.as_tensor(data, *args, **kwargs)


def with_sizes(index: Any) -> Any:
    """Return an index whose bounds are the sizes that numbers stand for."""
    if isinstance(index, tuple):
        return tuple(map(with_sizes, index))
    if isinstance(index, slice):
        return slice(*(with_sizes(bound) for bound in (index.start, index.stop, index.step)))
    return index.value if isinstance(index, SizeNumber) else index


__all__ = ["SizeNumber", "as_size_or_tensor", "with_sizes"]

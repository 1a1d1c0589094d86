"""Numbers made of sizes that a model's code puts into a tensor for a while.

`torch.ceil(torch.as_tensor(new * length / old)).long()` asks for the number's value, which freezes the length. `SizeNumber` stands
for such a tensor during a capture: what rounds it is arithmetic on the size, slices are given the size itself, and everything else
gets a tensor filled with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Size: TypeAlias = Any  # int, float, torch.SymInt or torch.SymFloat, which have no type in common

_ROUNDING: dict[Any, Callable[[Any], Any]] = {
    torch.ceil: math.ceil,
    torch.Tensor.ceil: math.ceil,
    torch.floor: math.floor,
    torch.Tensor.floor: math.floor,
}


# What takes sizes where a tensor may not stand.
_SHAPING = frozenset(
    {
        *(torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.expand, torch.Tensor.repeat, torch.Tensor.new_zeros),
        *(torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.narrow, torch.reshape, torch.narrow),
    }
)


def _between(operation: Callable[[Any, Any], Any], *, turned: bool = False) -> Callable[[SizeNumber, Any], Any]:
    """Return what an operator does between a number and another one, or a tensor."""

    def apply(self: SizeNumber, other: Any) -> Any:
        number = other.value if isinstance(other, SizeNumber) else other
        plain = isinstance(number, int | float | torch.SymInt | torch.SymFloat)
        left, right = (self.value, number) if plain else (_as_tensor(self), _as_tensor(other))
        result = operation(right, left) if turned else operation(left, right)
        return SizeNumber(result) if plain else result

    return apply


class _Computes:
    """What computes as the tensor that it stands for, where its own class says nothing else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_as_tensor(self), name)


def _as_tensors_do(name: str) -> Callable[..., Any]:
    def apply(self: Any, *others: Any) -> Any:
        return getattr(_as_tensor(self), name)(*map(_as_tensor, others))

    return apply


for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__mod__"),
    *("__floordiv__", "__pow__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(_Computes, _name, _as_tensors_do(_name))


class SizeNumber(_Computes):
    """A tensor of rank 0 that is known to be a size, or a number made of sizes."""

    __add__, __radd__ = _between(operator.add), _between(operator.add, turned=True)
    __sub__, __rsub__ = _between(operator.sub), _between(operator.sub, turned=True)
    __mul__, __rmul__ = _between(operator.mul), _between(operator.mul, turned=True)
    __truediv__, __rtruediv__ = _between(operator.truediv), _between(operator.truediv, turned=True)
    __floordiv__ = _between(operator.floordiv)

    def __init__(self, value: Size) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round the number itself; compute with a tensor of it otherwise."""
        if func in _ROUNDING and not kwargs and len(args) == 1:
            return cls(_ROUNDING[func](args[0].value))
        if func in _SHAPING:
            return func(*map(_as_size, args), **{name: _as_size(value) for name, value in (kwargs or {}).items()})
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})

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


class SizeNumbers(_Computes):
    """A tensor of rank 1 that is known to hold sizes, such as `torch.tensor(x.shape)`."""

    def __init__(self, values: Sequence[Size]) -> None:
        self.values = tuple(values)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Multiply and add the sizes themselves; compute with a tensor of them otherwise."""
        if func in _OF_ALL and not kwargs and len(args) == 1:
            return getattr(args[0], _OF_ALL[func])()
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return SizeNumber(self.values[index])
        return SizeNumbers(self.values[index]) if isinstance(index, slice) else _as_tensor(self)[index]

    def __len__(self) -> int:
        return len(self.values)

    def prod(self) -> SizeNumber:
        """Their product."""
        return SizeNumber(math.prod(self.values))

    def sum(self) -> SizeNumber:
        """Their sum."""
        return SizeNumber(sum(self.values))

    def tolist(self) -> list[Size]:
        """The sizes."""
        return list(self.values)


def _as_size(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_as_size, value))
    return value.value if isinstance(value, SizeNumber) else value


_OF_ALL = {torch.prod: "prod", torch.sum: "sum"}


def _as_tensor(value: Any) -> Any:
    if isinstance(value, SizeNumbers):
        return torch.stack([torch.full((), each) for each in value.values])
    return torch.full((), value.value) if isinstance(value, SizeNumber) else value


def sizes_or_none(data: Any) -> SizeNumbers | None:
    """Return what stands for a list of sizes, some of which are symbolic; None for anything else."""
    whole = isinstance(data, list | tuple) and all(isinstance(each, int | torch.SymInt) for each in data)
    return SizeNumbers(data) if whole and any(isinstance(each, torch.SymInt) for each in data) else None


def stepped(*bounds: Size, **options: Any) -> torch.Tensor:
    """`torch.arange`, but with steps that are no whole numbers up to a size: how many there are is a size too."""
    start, end, step = _bounds(*bounds, **{name: options[name] for name in ("start", "end", "step") if name in options})
    sized = any(isinstance(each, torch.SymInt | torch.SymFloat) for each in (start, end))
    stepping = isinstance(step, float) and step > 0 and not step.is_integer()
    if not sized or not stepping or options.get("out") is not None:
        return torch.arange(*bounds, **options)
    places = torch.arange(math.ceil((end - start) / step), device=options.get("device")).double() * step + start
    return places.to(options.get("dtype") or torch.get_default_dtype())


def _bounds(*given: Size, start: Size = 0, end: Size = 0, step: Size = 1) -> tuple[Size, Size, Size]:
    if len(given) == 1:
        return start, given[0], step
    return (*given, *(start, end, step)[len(given) :])  # type: ignore[return-value]


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


__all__ = ["SizeNumber", "SizeNumbers", "as_size_or_tensor", "sizes_or_none", "stepped", "with_sizes"]

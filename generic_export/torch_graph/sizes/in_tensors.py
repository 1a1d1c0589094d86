"""Numbers made of sizes that a model's code puts into a tensor for a while.

`torch.ceil(torch.as_tensor(new * length / old)).long()` asks for the number's value, which freezes the length. `SizeNumber` stands
for such a tensor during a capture: what rounds it, and what is computed of it and of numbers that are known, is arithmetic on the
size, slices are given the size itself, and everything else gets a tensor filled with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_sure

Size: TypeAlias = Any  # int, float, torch.SymInt or torch.SymFloat, which have no type in common

_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
}
"""What computes numbers, as Python's `operator` and as `torch` name it."""

_ROUNDING: dict[Any, Callable[[Any], Any]] = {
    torch.ceil: math.ceil,
    torch.Tensor.ceil: math.ceil,
    torch.floor: math.floor,
    torch.Tensor.floor: math.floor,
}


# What takes sizes where a tensor may not stand.
SHAPING = frozenset(
    {
        *(torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.expand, torch.Tensor.repeat, torch.Tensor.new_zeros),
        *(torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.narrow, torch.reshape, torch.narrow),
        *(torch.Tensor.as_strided, torch.as_strided, torch.Tensor.clamp, torch.clamp),
    }
)


def _between(name: str, *, turned: bool = False) -> Callable[[SizeNumber, Any], Any]:
    """Return what an operator does between a number and another one, or a tensor."""
    operation, of_tensors = getattr(operator, name), getattr(torch, _OPERATORS[name])

    def apply(self: SizeNumber, other: Any) -> Any:
        left, right = (other, self) if turned else (self, other)
        if isinstance(_as_size(other), int | float | torch.SymInt | torch.SymFloat):
            return SizeNumber(operation(_as_size(left), _as_size(right)))
        return of_tensors(left, right)  # a block of known buffers may know the other one's value

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
    *("__floordiv__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__pow__", "__neg__"),
):
    setattr(_Computes, _name, _as_tensors_do(_name))


class SizeNumber(_Computes):
    """A tensor of rank 0 that is known to be a size, or a number made of sizes."""

    __add__, __radd__ = _between("add"), _between("add", turned=True)
    __sub__, __rsub__ = _between("sub"), _between("sub", turned=True)
    __mul__, __rmul__ = _between("mul"), _between("mul", turned=True)
    __truediv__, __rtruediv__ = _between("truediv"), _between("truediv", turned=True)
    __floordiv__ = _between("floordiv")
    __lt__, __le__, __gt__, __ge__ = _between("lt"), _between("le"), _between("gt"), _between("ge")

    def __init__(self, value: Size) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round the number itself; compute with a tensor of it otherwise."""
        if func in _ROUNDING and not kwargs and len(args) == 1:
            return cls(_ROUNDING[func](args[0].value))
        if func in SHAPING:
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

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same as an integer; a tensor of it otherwise."""
        if len(args) == 1 and args[0] in (torch.int64, torch.int32) and not kwargs:
            return self.long()
        return _as_tensor(self).to(*args, **kwargs)

    def item(self) -> Size:
        """The number."""
        return self.value

    def __bool__(self) -> bool:
        return bool(self.value)


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
    if type(value) in (list, tuple):
        return type(value)(map(_as_tensor, value))
    if isinstance(value, SizeNumbers):
        return torch.stack([torch.full((), each) for each in value.values])
    if not isinstance(value, SizeNumber):
        return value
    if isinstance(value.value, torch.SymBool):
        return torch.full((), torch.sym_ite(value.value, 1, 0)).bool()
    return torch.full((), value.value)


def computed_of_sizes(function: Any, arguments: Sequence[Any]) -> SizeNumber | None:
    """Return what a function of tensors gives for sizes and plain numbers; None for one that is no arithmetic."""
    operation = _ARITHMETIC.get(function)
    return None if operation is None else SizeNumber(operation(*map(_as_size, arguments)))


def _turned(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: operation(right, left)


_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    **{
        function: getattr(operator, name)
        for name, of_tensors in _OPERATORS.items()
        for function in (
            getattr(torch, of_tensors),
            getattr(torch.Tensor, of_tensors),
            getattr(torch.Tensor, f"__{name}__"),
        )
    },
    **{
        getattr(torch.Tensor, f"__r{name}__"): _turned(getattr(operator, name))
        for name in ("add", "sub", "mul", "truediv", "floordiv")
    },
}


def padded(input: torch.Tensor, pad: Sequence[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.nn.functional.pad` by sizes."""
    return torch.nn.functional.pad(input, _as_size(pad), *args, **kwargs)


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


def divided(input: Any, other: Any, *, rounding_mode: str | None = None, **options: Any) -> Any:
    """`torch.div`, but of sizes: `torch.div(length, 4, rounding_mode="trunc")` is a size too."""
    pair = (input, other)
    sized = all(isinstance(each, int | torch.SymInt) for each in pair) and any(
        isinstance(e, torch.SymInt) for e in pair
    )
    # Below 0, `//` is no truncation.
    whole = rounding_mode != "trunc" or (sized and is_sure(input >= 0) and is_sure(other > 0))
    if not sized or options or not whole:
        return torch.div(input, other, rounding_mode=rounding_mode, **options)
    return SizeNumber(input / other if rounding_mode is None else input // other)


def size_in_tensor(data: Size, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """Return what stands for `torch.tensor` of a size, which asks for its value: a number, or a tensor [] of another dtype."""
    own = torch.int64 if isinstance(data, torch.SymInt) else torch.get_default_dtype()
    return SizeNumber(data) if dtype in (None, own) else torch.full((), data, dtype=dtype, device=device)


def with_sizes(index: Any) -> Any:
    """Return an index whose bounds are the sizes that numbers stand for."""
    if isinstance(index, tuple):
        return tuple(map(with_sizes, index))
    if isinstance(index, slice):
        return slice(*(with_sizes(bound) for bound in (index.start, index.stop, index.step)))
    return index.value if isinstance(index, SizeNumber) else index


__all__ = [
    "SizeNumber",
    "SizeNumbers",
    "as_size_or_tensor",
    "computed_of_sizes",
    "divided",
    "padded",
    "size_in_tensor",
    "sizes_or_none",
    "stepped",
    "with_sizes",
]

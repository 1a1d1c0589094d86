"""Numbers made of sizes that a model's code puts into a tensor for a while.

`torch.ceil(torch.as_tensor(new * length / old)).long()` asks for the number's value, which freezes the length. `SizeNumber` stands
for such a tensor during a capture: what rounds it, and what is computed of it and of numbers that are known, is arithmetic on the
size, slices are given the size itself, and everything else gets a tensor filled with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
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
    "eq": "eq",
    "ne": "ne",
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
        if isinstance(as_sizes(other), int | float | torch.SymInt | torch.SymFloat):
            return SizeNumber(operation(as_sizes(left), as_sizes(right)))
        return of_tensors(left, right)  # a block of known buffers may know the other one's value

    return apply


class _Computes:
    """What computes as the tensor that it stands for, where its own class says nothing else."""

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(tensor_of(self), name)


def tensor_ofs_do(name: str) -> Callable[..., Any]:
    def apply(self: Any, *others: Any) -> Any:
        return getattr(tensor_of(self), name)(*map(tensor_of, others))

    return apply


for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__mod__"),
    *("__floordiv__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("__pow__", "__neg__", "__abs__", "__matmul__", "__rmatmul__"),
):
    setattr(_Computes, _name, tensor_ofs_do(_name))


class SizeNumber(_Computes):
    """A tensor of rank 0 that is known to be a size, or a number made of sizes."""

    __add__, __radd__ = _between("add"), _between("add", turned=True)
    __sub__, __rsub__ = _between("sub"), _between("sub", turned=True)
    __mul__, __rmul__ = _between("mul"), _between("mul", turned=True)
    __truediv__, __rtruediv__ = _between("truediv"), _between("truediv", turned=True)
    __floordiv__ = _between("floordiv")
    __lt__, __le__, __gt__, __ge__ = _between("lt"), _between("le"), _between("gt"), _between("ge")
    __eq__, __ne__ = _between("eq"), _between("ne")  # type: ignore[assignment]
    __hash__ = object.__hash__

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
            return func(*map(as_sizes, args), **{name: as_sizes(value) for name, value in (kwargs or {}).items()})
        return func(*map(tensor_of, args), **{name: tensor_of(value) for name, value in (kwargs or {}).items()})

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
        return tensor_of(self).to(*args, **kwargs)

    def item(self) -> Size:
        """The number."""
        return self.value

    def __bool__(self) -> bool:
        return bool(self.value)


class FixedNumber(SizeNumber):
    """One that is the same at every size, such as the number of frames of an image: `range` takes it."""

    def __index__(self) -> int:
        return int(self.value)


class SizeTable(_Computes):
    """A tensor that is known to hold sizes, such as `torch.tensor(x.shape)` or a table of the grids of images.

    What is computed of it and of plain numbers, as far as `_OF_TABLES` and the operators go, are sizes too.
    """

    def __init__(self, values: Any, dtype: torch.dtype = torch.int64, device: Any = None) -> None:
        """Hold an array of sizes, or lists of them, as a tensor of a type of whole numbers on a device (the CPU)."""
        self.values: np.ndarray = np.array(values, dtype=object)
        self.dtype = dtype
        self.device = torch.device(device or "cpu")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the sizes themselves where that is arithmetic; with a tensor of them otherwise."""
        kwargs = kwargs or {}
        own = _OF_TABLES.get(getattr(func, "__name__", ""))
        found = own(*args, **kwargs) if own is not None and args and isinstance(args[0], SizeTable) else NotImplemented
        if found is not NotImplemented:
            return found
        return func(*map(tensor_of, args), **{name: tensor_of(value) for name, value in kwargs.items()})

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(part is None or part is ... or isinstance(part, int | slice) for part in parts)
        return self.like(self.values[index]) if plain else tensor_of(self)[index]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return map(self.like, self.values)

    def __getattr__(self, name: str) -> Any:
        own = _OF_TABLES.get(name)
        if own is None:
            return super().__getattr__(name)

        def applied(*args: Any, **kwargs: Any) -> Any:
            found = own(self, *args, **kwargs)
            return getattr(tensor_of(self), name)(*args, **kwargs) if found is NotImplemented else found

        return applied

    @property
    def is_open(self) -> bool:
        """Whether a size in it is symbolic."""
        return any(isinstance(each, torch.SymInt) for each in self.values.flat)

    @property
    def shape(self) -> torch.Size:
        """The shape of the table."""
        return torch.Size(self.values.shape)

    def like(self, values: Any, dtype: torch.dtype | None = None) -> Any:
        """Return a table of the same type, or one of another type, or a number."""
        if isinstance(values, np.ndarray):
            return SizeTable(values, dtype or self.dtype, self.device)
        return FixedNumber(values) if isinstance(values, int) else SizeNumber(values)

    def tolist(self) -> list[Any]:
        """The sizes."""
        found: list[Any] = self.values.tolist()
        return found

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same on another device, or as another integer type; a tensor of it otherwise."""
        dtype = next((each for each in args if isinstance(each, torch.dtype)), kwargs.get("dtype") or self.dtype)
        device = next((each for each in args if isinstance(each, torch.device | str)), kwargs.get("device"))
        if dtype not in _WHOLE or any(isinstance(each, torch.Tensor) for each in args):
            return tensor_of(self).to(*args, **kwargs)
        return SizeTable(self.values, dtype, device or self.device)


_WHOLE = (torch.int64, torch.int32)


def _with_table(name: str, *, turned: bool = False) -> Callable[[SizeTable, Any], Any]:
    """Return what an operator does between a table of sizes and another one, or numbers."""
    operation, of_tensors = getattr(operator, name), getattr(torch, _OPERATORS[name])

    def apply(self: SizeTable, other: Any) -> Any:
        known = other.values if isinstance(other, SizeTable) else as_sizes(other)
        if not isinstance(known, np.ndarray | int | torch.SymInt):
            left, right = (other, self) if turned else (self, other)
            return of_tensors(tensor_of(left), tensor_of(right))
        both = (self, other) if isinstance(other, SizeTable) else (self,)
        dtype = torch.int64 if any(each.dtype is torch.int64 for each in both) else torch.int32
        return self.like(operation(known, self.values) if turned else operation(self.values, known), dtype)

    return apply


for _name in ("add", "sub", "mul", "floordiv"):
    setattr(SizeTable, f"__{_name}__", _with_table(_name))
    setattr(SizeTable, f"__r{_name}__", _with_table(_name, turned=True))


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction of a table along one axis; as in PyTorch, the result is int64 unless `dtype` says otherwise."""

    def apply(table: SizeTable, dim: int | None = None, dtype: torch.dtype = torch.int64, **options: Any) -> Any:
        if options or dtype not in _WHOLE or not isinstance(dim, int | None):
            return NotImplemented
        return table.like(function(table.values, axis=dim), dtype)

    return apply


def _repeated(table: SizeTable, repeats: Any, dim: int | None = None, **options: Any) -> Any:
    """`torch.repeat_interleave` of a table of rank 1: a table again, or a tensor whose length is a size."""
    counts = repeats.tolist() if isinstance(repeats, SizeTable | torch.Tensor) else as_sizes(repeats)
    counts = counts if isinstance(counts, list) else [counts] * len(table)
    if options or table.values.ndim != 1 or len(counts) != len(table) or dim not in (None, 0):
        return NotImplemented
    if all(isinstance(count, int) for count in counts):
        return table.like(np.repeat(table.values, counts))
    pairs = zip(table.values, counts, strict=True)
    dtype, device = table.dtype, table.device
    return torch.cat([torch.full((count,), value, dtype=dtype, device=device) for value, count in pairs])


def _flattened(table: SizeTable, *options: Any, **named: Any) -> Any:
    return NotImplemented if options or named else table.like(table.values.reshape(-1))


_OF_TABLES: Mapping[str, Callable[..., Any]] = {
    "flatten": _flattened,
    "sum": _reduced(np.sum),
    "prod": _reduced(np.prod),
    "cumsum": _reduced(np.cumsum),
    "repeat_interleave": _repeated,
}
"""What gives sizes of tables of sizes, by its name in `torch` and of tensors; `NotImplemented` stands for a tensor's own."""


def as_sizes(value: Any) -> Any:
    """Return the sizes that numbers stand for, in lists too; everything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(as_sizes, value))
    return value.value if isinstance(value, SizeNumber) else value


def tensor_of(value: Any) -> Any:
    """Return a tensor for what stands for one, and for each such in lists; everything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(tensor_of, value))
    if isinstance(value, SizeTable):
        dtype, device = value.dtype, value.device
        single = [torch.full((), each, dtype=dtype, device=device) for each in value.values.flat]
        whole = torch.stack(single) if single else torch.zeros(0, dtype=dtype, device=device)
        return whole.reshape(value.shape)
    if not isinstance(value, SizeNumber):
        return value
    if isinstance(value.value, torch.SymBool):
        return torch.full((), torch.sym_ite(value.value, 1, 0)).bool()
    return torch.full((), value.value)


def computed_of_sizes(function: Any, arguments: Sequence[Any]) -> SizeNumber | None:
    """Return what a function of tensors gives for sizes and plain numbers; None for one that is no arithmetic."""
    operation = _ARITHMETIC.get(function)
    return None if operation is None else SizeNumber(operation(*map(as_sizes, arguments)))


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


def padded(input: Any, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Any:
    """`torch.nn.functional.pad` by sizes, or of a table of sizes."""
    amounts = as_sizes(pad)
    if isinstance(input, SizeTable) and mode == "constant" and all(isinstance(each, int) for each in amounts):
        pairs = list(zip(amounts[::2], amounts[1::2], strict=True))[::-1]
        around = [(0, 0)] * (input.values.ndim - len(pairs)) + pairs
        return input.like(np.pad(input.values, around, constant_values=value or 0))
    return torch.nn.functional.pad(tensor_of(input), amounts, mode, value)


def sizes_or_none(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> SizeTable | None:
    """Return the table of a list of sizes, or of nested lists of them; None if none is symbolic, or for other data."""
    leaves = list(_leaves(data)) if isinstance(data, list | tuple) and dtype in (None, *_WHOLE) else []
    found = SizeTable(data, dtype or torch.int64, device) if leaves and all(map(_is_size, leaves)) else None
    return found if found is not None and found.is_open else None


def _leaves(data: Any) -> Iterator[Any]:
    if not isinstance(data, list | tuple):
        yield data
        return
    for each in data:
        yield from _leaves(each)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def stepped(*bounds: Size, **options: Any) -> torch.Tensor:
    """`torch.arange`, but with steps that are floats from or to a size: how many there are is a size too."""
    bounds = tuple(map(as_sizes, bounds))
    start, end, step = _bounds(*bounds, **{name: options[name] for name in ("start", "end", "step") if name in options})
    sized = any(isinstance(each, torch.SymInt | torch.SymFloat) for each in (start, end))
    if not sized or not isinstance(step, float) or options.get("out") is not None:
        return torch.arange(*bounds, **options)
    device, dtype = options.get("device"), options.get("dtype") or torch.get_default_dtype()
    if step.is_integer() and all(isinstance(each, int | torch.SymInt) for each in (start, end)):
        return torch.arange(start, end, int(step), device=device).to(dtype)
    if step < 0 or step.is_integer():
        return torch.arange(*bounds, **options)
    places = torch.arange(math.ceil((end - start) / step), device=device).double() * step + start
    return places.to(dtype)


def _bounds(*given: Size, start: Size = 0, end: Size = 0, step: Size = 1) -> tuple[Size, Size, Size]:
    if len(given) == 1:
        return start, given[0], step
    return (*given, *(start, end, step)[len(given) :])  # type: ignore[return-value]


def as_size_or_tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.as_tensor`, but of sizes and of quotients of sizes."""
    if isinstance(data, torch.SymFloat) and not args and not kwargs:
        return SizeNumber(data)
    if isinstance(data, SizeTable):
        return data.to(*args, **{name: value for name, value in kwargs.items() if value is not None})
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
    "SizeTable",
    "as_size_or_tensor",
    "as_sizes",
    "computed_of_sizes",
    "divided",
    "padded",
    "size_in_tensor",
    "sizes_or_none",
    "stepped",
    "tensor_of",
    "with_sizes",
]

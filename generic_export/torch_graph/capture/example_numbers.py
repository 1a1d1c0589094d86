"""Numbers that a forward reads from tensors, such as `int(lengths.max())`: torch.export does not know them, the example does.

In: a module, its example, its dynamic axes. Out: what each number always is, the size of a dynamic axis or the example's own; and a
block in which a capture is told so. The module is run at other sizes to tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from generic_export.errors import SpecializedAxisError
from generic_export.torch_graph.capture.whole_sizes import whole_sizes
from generic_export.torch_graph.nested import FlatCall, resize_example, taken_apart
from generic_export.torch_graph.request import AxisSymbol, DynamicAxes, size_near, symbol_name
from generic_export.torch_graph.source_lines import running_source
from generic_export.torch_graph.state import state_kept

_Tensor = torch.Tensor
_READERS: frozenset[Callable[..., Any]] = frozenset(
    {_Tensor.item, _Tensor.tolist, _Tensor.__int__, _Tensor.__float__, _Tensor.__bool__, _Tensor.__index__}
)


_SUBSCRIPTS = frozenset({_Tensor.__getitem__, _Tensor.__setitem__})
"""Slices read the numbers of tensors that are their bounds: `x[:, : lengths.max()]`."""


@dataclass(frozen=True)
class ReadNumber:
    """A number that a forward reads.

    Attributes:
        source: the line.
        value: at the example.
        symbol: the dynamic size that it always is; None when it is always the example's value.
    """

    source: str
    value: Any
    symbol: str | None = None

    def told(self) -> str:
        """What a user has to know of it."""
        taken = f"{self.symbol}, the size of a dynamic axis" if self.symbol else f"{self.value}, as in the example"
        return f"At {self.source}, a number that is read from a tensor is assumed to be {taken}."


@dataclass(frozen=True)
class ExampleNumbers:
    """The numbers that one forward reads, in order.

    Attributes:
        model: the module.
        reads: the numbers.
        axes: for each symbol, an input tensor of the call and an axis that have its size.
    """

    model: nn.Module
    reads: tuple[ReadNumber, ...]
    axes: Mapping[str, tuple[int, int]]

    @property
    def caution(self) -> str:
        """What a user has to know of all of them."""
        return " ".join(dict.fromkeys(read.told() for read in self.reads))

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the forward read these numbers, for the length of the block."""
        forward = self.model.forward

        def told(*args: Any, **kwargs: Any) -> Any:
            leaves = [leaf for leaf in taken_apart((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            sizes = {symbol: leaves[number].shape[axis] for symbol, (number, axis) in self.axes.items()}
            with _Told(self.reads, sizes):
                return forward(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(whole_sizes(_globals_of(self.model)))
            stack.enter_context(mock.patch.object(self.model, "forward", told))
            yield


def example_numbers(
    model: nn.Module,
    call: FlatCall,
    names: Sequence[str],
    dynamic_axes: DynamicAxes,
) -> ExampleNumbers | None:
    """Find out what the numbers are that a forward reads; None when it reads none.

    Args:
        model: a module, in eval mode.
        call: its example.
        names: of the input tensors.
        dynamic_axes: axes that must not be frozen.

    Raises:
        SpecializedAxisError: a number changes with a dynamic size, and is not that size.
    """
    axes = _first_axes(names, dynamic_axes)
    sizes = {symbol: int(call.tensors[number].shape[axis]) for symbol, (number, axis) in axes.items()}
    first = _reads(model, call, call.tensors)
    if not first:
        return None
    others, declared = [], _declared(names, dynamic_axes)
    for symbol, size in sizes.items():
        for change in (size_near(declared[symbol], other) for other in (2 * size, size + 1)):
            tensors = [
                _with_size(tensor, _axes_of(dynamic_axes.get(name, {}), symbol), change)
                for name, tensor in zip(names, call.tensors, strict=True)
            ]
            others.append(_Rerun({**sizes, symbol: change}, symbol, _reads(model, call, tensors)))
    reads = tuple(_judged(index, read, sizes, others) for index, read in enumerate(first))
    return ExampleNumbers(model, reads, axes)


def _with_size(tensor: torch.Tensor, axes: Collection[int], wanted: int) -> torch.Tensor:
    return resize_example(tensor, [wanted if axis in axes else size for axis, size in enumerate(tensor.shape)])


@dataclass(frozen=True)
class _Rerun:
    """What a forward read when one symbol had another size; `reads` is None when it takes no such arguments."""

    sizes: Mapping[str, int]
    symbol: str
    reads: Sequence[ReadNumber] | None


def _judged(index: int, read: ReadNumber, sizes: Mapping[str, int], others: Sequence[_Rerun]) -> ReadNumber:
    """Return what a number always is, as far as the other runs tell."""
    symbols = [symbol for symbol, size in sizes.items() if type(read.value) is int and read.value == size]
    constant, tried = True, set()
    for other in others:
        if other.reads is None:
            continue
        if index >= len(other.reads) or other.reads[index].source != read.source:
            raise _frozen(read, other.symbol, "other numbers are read")
        tried.add(other.symbol)
        now = other.reads[index].value
        constant = constant and now == read.value
        symbols = [symbol for symbol in symbols if now == other.sizes[symbol]]
    # At no other size of it does the module run with these values: so they speak of that size.
    bound = [symbol for symbol in symbols if symbol not in tried or not constant]
    if len(bound) == 1:
        return ReadNumber(read.source, read.value, bound[0])
    if bound:
        raise _frozen(read, " and ".join(bound), "several sizes are equal in the example, so it may be any of them")
    if not constant:
        raise _frozen(read, ", ".join(sizes), "it is none of the sizes, but changes with them")
    return read


def _frozen(read: ReadNumber, symbols: str, reason: str) -> SpecializedAxisError:
    return SpecializedAxisError(
        f"{read.source}: a number is read from a tensor ({read.value} in the example) with dynamic "
        f"{symbols}: {reason}.",
        "Take it from the shape of an input, or use an example in which all sizes differ.",
    )


def _declared(names: Sequence[str], dynamic_axes: DynamicAxes) -> dict[str, AxisSymbol]:
    return {symbol_name(symbol): symbol for name in names for symbol in dynamic_axes.get(name, {}).values()}


def _first_axes(names: Sequence[str], dynamic_axes: DynamicAxes) -> dict[str, tuple[int, int]]:
    axes: dict[str, tuple[int, int]] = {}
    for number, name in enumerate(names):
        for axis, symbol in dynamic_axes.get(name, {}).items():
            axes.setdefault(symbol_name(symbol), (number, axis))
    return axes


def _axes_of(axes: Mapping[int, Any], symbol: str) -> set[int]:
    return {axis for axis, given in axes.items() if symbol_name(given) == symbol}


# --- reading ----------------------------------------------------------------------------------------


def _reads(model: nn.Module, call: FlatCall, tensors: Sequence[torch.Tensor]) -> list[ReadNumber] | None:
    """Run a module and return the numbers that it reads; None when it fails."""
    args, kwargs = call.arguments([tensor.clone() for tensor in tensors])
    with torch.no_grad(), state_kept(model), _Seen() as seen:
        try:
            model(*args, **kwargs)
        except Exception:  # whatever the module raises at a size that it does not take
            return None
    return seen.reads


def _line() -> str:
    return running_source() or "a line of PyTorch"


def _with_read_bounds(args: tuple[Any, ...], read: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
    """Return the arguments of a subscript with numbers for the tensors that are bounds of its slices."""
    tensor, place, *rest = args
    parts = place if isinstance(place, tuple) else (place,)
    known = tuple(_with_numbers(part, read) if isinstance(part, slice) else part for part in parts)
    return tensor, known if isinstance(place, tuple) else known[0], *rest


def _with_numbers(part: slice, read: Callable[[torch.Tensor], Any]) -> slice:
    bounds = (read(bound) if isinstance(bound, torch.Tensor) else bound for bound in (part.start, part.stop, part.step))
    return slice(*bounds)


class _Seen(TorchFunctionMode):
    """Notes the numbers that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[ReadNumber] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SUBSCRIPTS:
            args = _with_read_bounds(args, self._read)
        result = func(*args, **(kwargs or {}))
        if func in _READERS:
            self.reads.append(ReadNumber(_line(), result))
        return result

    def _read(self, bound: torch.Tensor) -> Any:
        return self.__torch_function__(_Tensor.__index__, (), (bound,))


class _Told(TorchFunctionMode):
    """Answers with numbers that are known, in the order in which they were read."""

    def __init__(self, reads: Sequence[ReadNumber], sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self._reads, self._sizes = iter(reads), sizes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SUBSCRIPTS:
            args = _with_read_bounds(args, lambda bound: self.__torch_function__(_Tensor.__index__, (), (bound,)))
        if func not in _READERS:
            return func(*args, **(kwargs or {}))
        read = next(self._reads, None)
        if read is None or read.source != _line():
            return func(*args, **(kwargs or {}))  # not the way that the example took: the capture fails by itself
        return read.value if read.symbol is None else self._sizes[read.symbol]


def _globals_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global names of the files that a model's classes are written in, PyTorch's own left out."""
    found = {
        id(names): names
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
        and (names := getattr(type(module).forward, "__globals__", None)) is not None
    }
    return list(found.values())


__all__ = ["ExampleNumbers", "ReadNumber", "example_numbers"]

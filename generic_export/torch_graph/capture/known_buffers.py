"""Values of small buffers, where a module's own code decides by them: known while it is captured, unlike those of weights.

In: a module and the values of its small buffers. Out: a block in which `bool(buffer[0] > 0)`, `.item()` and the like give what
they give when the module runs. What a module computes of such buffers alone is known as well; what it writes to is not.
EoMT keeps in a buffer which of its layers mask, EnCodec strides and paddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from generic_export.compat import DisableTorchFunction, pytree, without_modes
from generic_export.errors import CaptureError
from generic_export.torch_graph.sizes.in_tensors import SHAPING, SizeNumber, SizeTable, computed_of_sizes

MOST_VALUES = 64
"""How many values a buffer may have that a module decides by."""

_MOST_COMPUTED = 1 << 22
"""How many values may be computed of such buffers at once: which patch of an image goes to which row, one hot."""

_Tensor = torch.Tensor
_READERS = frozenset(
    {
        _Tensor.item,
        _Tensor.tolist,
        _Tensor.__bool__,
        _Tensor.__int__,
        _Tensor.__float__,
        _Tensor.__index__,
        _Tensor.__complex__,
        _Tensor.__contains__,
        torch.equal,
        _Tensor.equal,
        torch.allclose,
        _Tensor.allclose,
    }
)
"""What gives Python the values of tensors."""

_COUNTERS = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace, torch.eye})
_MAKERS = _COUNTERS | {torch.tensor}
"""What makes a tensor of numbers."""

_TAKE_SIZES = SHAPING | {
    torch.nn.functional.pad,
    torch.nn.functional.interpolate,
    torch.split,
    _Tensor.split,
    torch.narrow,
}
"""What is given sizes or amounts as numbers, or as tensors of one number."""

_SHAPED_BY_VALUES = frozenset(
    {
        *(torch.nonzero, _Tensor.nonzero, torch.masked_select, _Tensor.masked_select, torch.argwhere, _Tensor.argwhere),
        *(torch.unique, _Tensor.unique, torch.unique_consecutive, _Tensor.unique_consecutive),
        *(torch.repeat_interleave, _Tensor.repeat_interleave, torch.bincount, _Tensor.bincount),
    }
)
"""What gives tensors whose sizes depend on values."""


def small_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module that have few values, and have them at hand, by qualified name."""
    return {
        name: buffer.detach().cpu().clone()
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if type(buffer) in (torch.Tensor, nn.Buffer) and not buffer.is_meta and buffer.numel() <= MOST_VALUES
    }


@contextmanager
def decided_by(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module's code decide by the values of its buffers, for the length of a block in its forward.

    Args:
        module: its buffers have no values now (they are fake, or on the meta device).
        values: those of some of them, by qualified name.

    Raises:
        CaptureError: the module writes to a buffer that it decides by.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    known = _KnownValues({name: (buffers[name], value) for name, value in values.items() if name in buffers})
    with known:
        yield
    after = dict(module.named_buffers(remove_duplicate=False))
    known.refuse_written(name for name in values if after.get(name) is not buffers.get(name))


@contextmanager
def forward_decided_by(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let each call of a module's forward run within `decided_by`, for the length of a block."""
    forward = module.forward

    def decided(*args: Any, **kwargs: Any) -> Any:
        with decided_by(module, values):
            return forward(*args, **kwargs)

    with mock.patch.object(module, "forward", decided):
        yield


@dataclass(frozen=True)
class _Known:
    """What is known of a tensor.

    Attributes:
        tensor: it is held, so that no other object takes its place.
        value: on the CPU.
        origins: the buffers that it is computed of.
    """

    tensor: torch.Tensor
    value: torch.Tensor
    origins: frozenset[str]


class _KnownValues(TorchFunctionMode):
    """Follows what is computed of known tensors alone, and answers for them."""

    def __init__(self, buffers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._known = {id(each): _Known(each, value, frozenset({name})) for name, (each, value) in buffers.items()}
        self._buffers = {name: _place(value) for name, (_, value) in buffers.items()}
        self._read: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COUNTERS:
            args, kwargs = self._with_numbers(args), self._with_numbers(kwargs)
        elif func in _TAKE_SIZES:
            args, kwargs = (*args[:1], *self._with_numbers(args[1:])), self._with_numbers(kwargs)
        elif func is _Tensor.__getitem__:
            args = (args[0], self._with_places(args[1]))
        elif func is _Tensor.__iter__:
            return iter(self.__torch_function__(_Tensor.unbind, types, args))
        elif func in (_Tensor.cpu, _Tensor.to) and args[0].is_meta and id(args[0]) in self._known:
            func, args, kwargs = _Tensor.to, *_elsewhere(args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = [self._known[id(tensor)] for tensor in tensors if id(tensor) in self._known]
        if not found:
            result = func(*args, **kwargs)
            if func in _MAKERS and not tensors and not any(map(_is_symbolic, leaves)):
                self._learn(func, args, kwargs, result, frozenset())
            return result
        origins = frozenset().union(*(each.origins for each in found))
        known, sized = len(found) == len(tensors), any(map(_is_symbolic, leaves))
        whole = known and not sized
        # What is on the meta device may not go with what is not; the values do.
        apart = whole and len({tensor.is_meta for tensor in tensors}) > 1
        if _writes(func, kwargs):
            self._write(func, args, kwargs, whole)
            return args[0] if apart else func(*args, **kwargs)
        if known and sized and not kwargs and (size := self._of_sizes(func, args)) is not None:
            self._read |= origins
            return size
        if whole and func in _READERS:
            self._read |= origins
            return self._computed(func, args, kwargs)
        if whole and _shaped_by_values(func, args):
            self._read |= origins
            return self._written_down(self._computed(func, args, kwargs), origins, tensors[0].device)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if not apart:
                raise
            return self._written_down(self._computed(func, args, kwargs), origins, torch.device("cpu"))
        if whole:
            self._learn(func, args, kwargs, result, origins)
        return result

    def _written_down(self, values: Any, origins: frozenset[str], device: torch.device) -> Any:
        """Return tensors of known values as constants of the graph."""

        def written(value: torch.Tensor) -> torch.Tensor:
            constant: torch.Tensor = torch.ops.aten.lift_fresh.default(value).to(device)
            self._known[id(constant)] = _Known(constant, value, origins)
            return constant

        return pytree.tree_map_only(torch.Tensor, written, values)

    def _with_numbers(self, given: Any) -> Any:
        """Return sizes and amounts with numbers instead of known tensors."""

        def number(leaf: torch.Tensor) -> Any:
            found = self._number(leaf)
            if found is not leaf:
                self._read |= self._known[id(leaf)].origins
            return found

        return pytree.tree_map_only(torch.Tensor, number, given)

    def _with_places(self, index: Any) -> Any:
        """Return an index with numbers instead of known tensors in its slices, and places instead of known masks."""
        if isinstance(index, tuple):
            return tuple(each for part in index for each in self._places(part))
        places = self._places(index)
        return places[0] if len(places) == 1 else places

    def _places(self, part: Any) -> tuple[Any, ...]:
        """Return what a part of an index is as numbers: a mask becomes an index for each of its axes."""
        if isinstance(part, slice):
            return (slice(*self._with_numbers([part.start, part.stop, part.step])),)
        known = self._known.get(id(part))
        if known is None or known.value.dtype is not torch.bool or not known.value.ndim:
            return (part,)
        self._read |= known.origins
        places = self._computed(torch.nonzero, (part,), {"as_tuple": True})
        return tuple(self._written_down(places, known.origins, part.device))

    def _of_sizes(self, func: Callable[..., Any], args: tuple) -> Any:
        """Return what is computed of sizes and of single known numbers; None where it is no arithmetic."""
        numbers = pytree.tree_map_only(torch.Tensor, self._number, args)
        return None if any(isinstance(each, torch.Tensor) for each in numbers) else computed_of_sizes(func, numbers)

    def _number(self, tensor: torch.Tensor) -> Any:
        """Return the whole number in a known tensor of rank 0, and any other tensor as it is."""
        known = self._known.get(id(tensor))
        is_number = known is not None and not (known.value.ndim or known.value.is_floating_point())
        return known.value.item() if known is not None and is_number else tensor

    def refuse_written(self, names: Iterator[str]) -> None:
        """Raise an error where a buffer that decided something is written to.

        Raises:
            CaptureError: it is.
        """
        for name in sorted(self._read.intersection(names)):
            raise CaptureError(
                f"the module branches on the values of its buffer {name!r}, and writes to it.",
                "Make it a Python attribute, or do not write to the buffer.",
            )

    def _learn(
        self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], result: Any, origins: frozenset[str]
    ) -> None:
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made or any(_is_symbolic(size) for each in made for size in each.shape):
            return
        if sum(each.numel() for each in made) > _MOST_COMPUTED:
            return
        values = pytree.tree_leaves(self._computed(func, args, kwargs))
        values = [leaf for leaf in values if isinstance(leaf, torch.Tensor)]
        for each, value in zip(made, values, strict=False):
            if value.device.type == "cpu" and value.shape == each.shape and value.dtype == each.dtype:
                self._known[id(each)] = _Known(each, value, origins)

    def _computed(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function on the values; None where it draws numbers at random."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self._known[id(leaf)].value
            if isinstance(leaf, SizeTable):
                return torch.tensor(leaf.values.tolist(), dtype=leaf.dtype)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with without_modes(), DisableTorchFunction(), torch.no_grad():
            given, keywords = pytree.tree_map(value, (args, kwargs))
            before = torch.get_rng_state()
            result = func(*given, **keywords)
            drawn = not torch.equal(before, torch.get_rng_state())
            if drawn:
                torch.set_rng_state(before)
        return None if drawn else result

    def _write(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], is_known: bool) -> None:
        """Write to the values too, which are views of each other where the tensors are; forget them where that cannot be.

        Raises:
            CaptureError: a buffer is written to that something was decided by.
        """
        target = kwargs.get("out", args[0] if args else None)
        leaves = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor)]
        written = [self._known[id(leaf)] for leaf in leaves if id(leaf) in self._known]
        places = {_place(each.value) for each in written}
        buffers = frozenset(name for name, place in self._buffers.items() if place in places)
        self.refuse_written(iter(buffers))
        if is_known and not buffers and func is not _DATA_SET:
            self._computed(func, args, kwargs)
            return
        self._known = {
            key: each
            for key, each in self._known.items()
            if _place(each.value) not in places and not each.origins & buffers
        }


_DATA_SET = _Tensor.data.__set__  # type: ignore[attr-defined]


def _elsewhere(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a move to a device without it: the values stay where they are known."""
    dtypes = [leaf for leaf in (*args[1:], *kwargs.values()) if isinstance(leaf, torch.dtype)]
    return (args[0], *dtypes[:1]) if dtypes else (args[0], args[0].dtype), {}


def _place(value: torch.Tensor) -> int:
    """Return what is the same for tensors that are views of each other."""
    return value.untyped_storage().data_ptr()


def _shaped_by_values(func: Callable[..., Any], args: tuple) -> bool:
    """Say whether the size of a function's result depends on values."""
    if func is _Tensor.__getitem__:
        return any(leaf.dtype is torch.bool for leaf in pytree.tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor))
    return func in _SHAPED_BY_VALUES or (func is torch.where and len(args) == 1)


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a function changes its first argument, by PyTorch's rules for names."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # `buffer.data = ...`
        return True
    if name.startswith("__"):
        return name == "__setitem__" or (name[2] == "i" and name not in _NOT_IN_PLACE)
    return name.endswith("_") or kwargs.get("out") is not None


_NOT_IN_PLACE = frozenset({"__int__", "__index__", "__invert__", "__init__"})


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, SizeTable):
        return value.is_open
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | SizeNumber)


__all__ = ["MOST_VALUES", "decided_by", "forward_decided_by", "small_buffers"]

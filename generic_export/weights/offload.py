"""Tensors that live on disk until an operator uses them, so that a module larger than memory can run and be exported.

In: `TensorSource` objects and a byte budget. Out: `OffloadedTensor`, a `torch.Tensor` whose values are read on use and
kept, least recently used first out, within the budget of its `OffloadStore`.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from generic_export.compat import (
    DisableTorchFunctionSubclass,
    buffers_of,
    parameters_of,
    pytree,
    schema_of,
    wrapper_tensor,
    written_arguments,
)
from generic_export.errors import OptionError, WeightError
from generic_export.weights.source import CHUNK_BYTES, LikeTensor, SelfStored, TensorSource
from generic_export.weights.values import read_tensor, value_pieces

_aten = torch.ops.aten

# Operators whose result is the same tensor on disk again: nothing is read.
_LAZY = frozenset({_aten.detach.default, _aten.alias.default})
# Methods that read a tensor's memory without passing PyTorch's dispatcher.
_NEED_MEMORY = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.share_memory_,
        torch.Tensor.pin_memory,
    }
)


@dataclass(frozen=True)
class OffloadStats:
    """What a store has done so far.

    Attributes:
        hits: uses answered from memory.
        loads: uses that read the disk.
        evictions: tensors dropped to make room.
        resident_bytes: bytes the store holds now.
        peak_bytes: the most it held; never more than the budget.
    """

    hits: int
    loads: int
    evictions: int
    resident_bytes: int
    peak_bytes: int


_Key = tuple[int, torch.dtype, torch.device]


class OffloadStore:
    """Keeps recently used tensors in memory, within a budget; safe to use from several threads.

    A tensor larger than the budget is read, used and dropped. The store counts what it holds itself: a result that is
    a view of a tensor (a row, a transpose) keeps that tensor in memory as long as the caller keeps the view.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Make an empty store.

        Args:
            budget_bytes: most bytes held at any time; 0 keeps nothing.

        Raises:
            OptionError: the budget is negative.
        """
        if budget_bytes < 0:
            raise OptionError(f"budget_bytes is {budget_bytes}.", "Use a number of bytes of 0 or more.")
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        # The source stands beside its values: its id is the key, and must not be given to another one.
        self._resident: OrderedDict[_Key, tuple[TensorSource, torch.Tensor]] = OrderedDict()
        self._loading: dict[_Key, threading.Lock] = {}
        self._hits = self._loads = self._evictions = self._bytes = self._peak = 0

    @property
    def stats(self) -> OffloadStats:
        """Return the counts of this moment."""
        with self._lock:
            return OffloadStats(self._hits, self._loads, self._evictions, self._bytes, self._peak)

    def tensor(self, source: TensorSource, dtype: torch.dtype | None = None) -> OffloadedTensor:
        """Return a tensor on disk that reads its values through this store.

        Args:
            source: where the values come from; it is kept, and read again after an eviction.
            dtype: element type of the tensor; None takes the source's, another one is cast to while reading.
        """
        return OffloadedTensor(source, self, dtype or source.dtype)

    def fetch(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a source's values; the result is shared and must not be written to."""
        key = (id(source), dtype, device)
        size = math.prod(source.shape) * dtype.itemsize
        with self._lock:
            turn = self._loading.setdefault(key, threading.Lock())
        with turn:  # a second thread that wants the same tensor waits for it instead of reading it too
            held = self._held(key)
            if held is not None:
                return held
            keep = self._reserve(size)
            try:
                values = read_tensor(source, dtype).to(device)
            except BaseException:
                with self._lock:
                    self._bytes -= size if keep else 0
                raise
            with self._lock:
                self._loads += 1
                if keep:
                    self._resident[key] = (source, values)
            return values

    def clear(self) -> None:
        """Drop everything that is held; tensors are read again when they are used next."""
        with self._lock:
            self._evictions += len(self._resident)
            self._bytes -= sum(values.nbytes for _, values in self._resident.values())
            self._resident.clear()

    def _held(self, key: _Key) -> torch.Tensor | None:
        with self._lock:
            if key not in self._resident:
                return None
            self._hits += 1
            self._resident.move_to_end(key)
            return self._resident[key][1]

    def _reserve(self, size: int) -> bool:
        """Make room before the read, so that the budget holds while it goes on; False when it never can."""
        with self._lock:
            if size > self.budget_bytes:
                return False
            while self._bytes + size > self.budget_bytes and self._resident:
                _, (_, dropped) = self._resident.popitem(last=False)
                self._bytes -= dropped.nbytes
                self._evictions += 1
            if self._bytes + size > self.budget_bytes:  # other threads are reading into the rest
                return False
            self._bytes += size
            self._peak = max(self._peak, self._bytes)
            return True


class OffloadedTensor(torch.Tensor):
    """A tensor on disk; see the module's docstring.

    Shape, dtype, device and `repr` read nothing. Any operator reads the values and returns a plain tensor. It cannot be
    written to in place, and is not pickled: its values are a file's.

    Attributes:
        source: where the values come from.
        store: what keeps the values that were used.
    """

    source: TensorSource
    store: OffloadStore

    @staticmethod
    def __new__(cls: type[OffloadedTensor], source: TensorSource, store: OffloadStore, dtype: torch.dtype) -> Any:
        tensor = wrapper_tensor(cls, source.shape, dtype=dtype, requires_grad=False)
        tensor.source, tensor.store = source, store
        return tensor

    def __init__(self, source: TensorSource, store: OffloadStore, dtype: torch.dtype) -> None:
        del source, store, dtype  # __new__ took them; Tensor has no initialiser of its own

    def load(self) -> torch.Tensor:
        """Return the values as a plain tensor, shared with the store: do not write to it."""
        # The tensor's own dtype, not the source's: module.float() changes it through `.data`.
        return self.store.fetch(self.source, self.dtype, self.device)

    def stored_source(self, name: str) -> TensorSource:
        """The source of the bytes, under that name."""
        return OffloadedSource(name, self)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__setitem__ and isinstance(args[0], OffloadedTensor):
            raise _not_writable(args[0], func)  # the dispatcher would see a write to a view of what was read
        if func in _NEED_MEMORY and args and isinstance(args[0], OffloadedTensor):
            return func(args[0].load(), *args[1:], **kwargs)
        with DisableTorchFunctionSubclass():  # results are plain tensors, not made into this class
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _LAZY:
            return _same(args[0], args[0].dtype)
        if func is _aten._to_copy.default and set(kwargs) <= {"dtype"}:
            return _same(args[0], kwargs.get("dtype") or args[0].dtype)
        if schema_of(func).is_mutable:
            _refuse_writing(func, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        plain = [leaf.load() if isinstance(leaf, OffloadedTensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(plain, spec)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedTensor:
        """Return another tensor over the same file region."""
        copied: OffloadedTensor = _same(self, self.dtype)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)  # type: ignore[assignment]
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            WeightError: always.
        """
        raise WeightError(
            f"tensor {self.source.name}: it is on disk and cannot be pickled.", "Pickle tensor.load() instead."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor without reading it."""
        del tensor_contents
        return f"OffloadedTensor({self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _same(tensor: OffloadedTensor, dtype: torch.dtype) -> OffloadedTensor:
    return OffloadedTensor(tensor.source, tensor.store, dtype)


def _refuse_writing(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
    for target in written_arguments(func, args, kwargs):
        if isinstance(target, OffloadedTensor):
            raise _not_writable(target, func)


def _not_writable(tensor: OffloadedTensor, func: Any) -> WeightError:
    return WeightError(
        f"tensor {tensor.source.name}: {getattr(func, '__name__', func)} would write to a tensor on disk.",
        "Use the operator that returns a new tensor, or write to tensor.load().clone().",
    )


# --- modules ----------------------------------------------------------------------------------


def offload_parameters(module: nn.Module, sources: Mapping[str, TensorSource], store: OffloadStore) -> nn.Module:
    """Replace a module's parameters, which may be on the meta device, by tensors on disk; tied ones stay tied.

    Args:
        module: changed in place; its parameters keep their element types and no longer require gradients.
        sources: by parameter name; a tied parameter is found under any of its names. Parameters without a source stay.
        store: what keeps the values that were used.

    Returns:
        The module.

    Raises:
        WeightError: a source has another shape than its parameter.
    """
    replaced: dict[int, nn.Parameter] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if name in sources and id(parameter) not in replaced:
            replaced[id(parameter)] = _offloaded_parameter(name, parameter, sources[name], store)
    for name, parameter in named:
        if id(parameter) in replaced:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, replaced[id(parameter)])
    return module


def _offloaded_parameter(name: str, parameter: nn.Parameter, source: TensorSource, store: OffloadStore) -> nn.Parameter:
    if tuple(source.shape) != tuple(parameter.shape):
        raise WeightError(
            f"parameter {name} has shape {list(parameter.shape)}, but its source has {list(source.shape)}."
        )
    return nn.Parameter(store.tensor(source, parameter.dtype), requires_grad=False)


@contextmanager
def unread_parameters(module: nn.Module) -> Iterator[None]:
    """Let a module have plain tensors of no value in place of those that store themselves (on disk, in blocks).

    A capture needs shapes and dtypes only.
    """
    stand_ins: dict[int, torch.Tensor] = {}
    held: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (parameters_of(owner), buffers_of(owner))
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and isinstance(tensor, SelfStored):
                    held.append((table, name, tensor))
                    stand_ins.setdefault(id(tensor), _stand_in(tensor))
    try:
        for table, name, tensor in held:
            table[name] = stand_ins[id(tensor)]
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    # Memory that is never touched is never given by the operating system.
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


@dataclass(frozen=True, eq=False)
class OffloadedSource(LikeTensor):
    """The `TensorSource` of a tensor on disk: streams from its file, past the store.

    Args:
        name: what the tensor is called downstream.
        tensor: its values, cast to its own element type where the file has another.
    """

    tensor: OffloadedTensor

    def chunks(self) -> Iterator[memoryview]:
        """The file's chunks, each cast on its way; raises whatever the source raises."""
        source = self.tensor.source
        if source.dtype == self.dtype:
            yield from source.chunks()
            return
        step = CHUNK_BYTES // self.dtype.itemsize
        for piece in value_pieces(source):
            for start in range(0, len(piece), step):
                yield piece[start : start + step].to(self.dtype).view(torch.uint8).numpy().data

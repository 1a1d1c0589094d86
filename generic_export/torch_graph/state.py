"""A module that runs and is none the worse for it: what its forward writes into it is undone when the block ends.

In: a module. Out: the same module, bit for bit. Memory is copied only where it is written to, so weights cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from generic_export.compat import (
    MODULE_STATE,
    HigherOrderOperator,
    TorchDispatchMode,
    schema_of,
    without_modes,
    written_arguments,
)

_aten = torch.ops.aten
_CONTAINERS = (list, dict, set)
_Undo = Callable[[], None]


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Give a module back as it was: parameters, buffers, attributes, and lists, dicts and sets that are attributes.

    What a forward writes in place is copied before the write. Tensors of a class of their own (on disk, in blocks) are left alone.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if type(tensor) in _PLAIN]
    memory = _Memory(tensors)
    shapes = [_shape_undone(tensor) for tensor in tensors]
    with attributes_kept(module):
        try:
            with memory:
                yield
        finally:
            for undo in (*shapes, *memory.undos):
                undo()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give a module and those in it their attributes back when the block ends; what tensors hold is not looked at."""
    undos = [undo for inner in module.modules() for undo in _attributes_undone(inner)]
    try:
        yield
    finally:
        for undo in undos:
            undo()


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Give a module its buffers and attributes back where nobody may watch it run: under a mode, torch.jit.trace takes what some
    convolutions compute for constants. What a forward writes into parameters is not undone."""
    saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if type(buffer) in _PLAIN]
    with attributes_kept(module):
        try:
            yield
        finally:
            for buffer, copy in saved:
                if buffer.shape == copy.shape:
                    buffer.data.copy_(copy)
                else:
                    buffer.data = copy


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class _Memory(TorchDispatchMode):
    """Copies the memory of some tensors before an operator writes to it."""

    supports_higher_order_operators = True  # `scan`, `cond`: their graphs write to nothing outside of them

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}  # 0: no memory, or none at all
        self._writes: dict[Any, bool] = {}
        self.undos: list[_Undo] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave `torch.compile` at work: under other modes it marks `torch.cond` as what it must never compile again."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        keywords = kwargs or {}
        if isinstance(operator, HigherOrderOperator):
            return operator(*args, **keywords)
        if operator is _aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            return args[0]  # a script's constant, which arrives as a number already
        if self._writing(operator):
            for value in _written(operator, args, keywords):
                self._copy(value)
        return operator(*args, **keywords)

    def _writing(self, operator: Any) -> bool:
        if operator not in self._writes:
            self._writes[operator] = schema_of(operator).is_mutable or _writes_unsaid(operator)
        return self._writes[operator]

    def _copy(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in _PLAIN:
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._owned:
            self._owned.remove(storage.data_ptr())
            with without_modes():
                copy = storage.clone()
            self.undos.append(lambda: _restored(storage, copy))


def _restored(storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
    if storage.nbytes() != copy.nbytes():
        storage.resize_(copy.nbytes())
    storage.copy_(copy)


def _written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to."""
    yield from written_arguments(operator, args, kwargs)
    if _writes_unsaid(operator):
        names = [argument.name for argument in schema_of(operator).arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("training") is not False:
            yield from (v for n, v in given.items() if n.startswith("running_") and isinstance(v, torch.Tensor))


def _writes_unsaid(operator: Any) -> bool:
    """Norms of batches update running means, which most of their schemas keep to themselves."""
    return "batch_norm" in schema_of(operator).name


def _shape_undone(tensor: torch.Tensor) -> _Undo:
    """Return what gives a tensor the memory, sizes and strides back that it has now."""
    alias = tensor.detach()

    def undo() -> None:
        same = alias.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if not same or (alias.shape, alias.stride()) != (tensor.shape, tensor.stride()):
            tensor.data = alias

    return undo


# --- attributes -------------------------------------------------------------------------------------


def _attributes_undone(module: nn.Module) -> Iterator[_Undo]:
    if isinstance(module, torch.jit.ScriptModule):
        yield from _script_undone(module)
        return
    own = vars(module)
    tables = [own, *(own[name] for name in MODULE_STATE if name in own)]
    containers = [value for value in own.values() if type(value) in _CONTAINERS]
    for table in (*tables, *containers):
        yield _container_undone(table)


def _container_undone(container: Any) -> _Undo:
    before = container.copy()

    def undo() -> None:
        if not _same(before, container):
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)

    return undo


def _same(before: Any, now: Any) -> bool:
    """Say whether two containers hold the same objects in the same order."""
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        return all(a == b and before[a] is now[b] for a, b in zip(before, now, strict=True))
    return before == now if isinstance(before, set) else all(map(_is, before, now))


def _is(one: object, other: object) -> bool:
    return one is other


def _script_undone(module: torch.jit.ScriptModule) -> Iterator[_Undo]:
    """A script's tensors are no entries of a dict: reading one makes a new object each time."""
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield _script_tensor_undone(module, name, tensor)


def _script_tensor_undone(module: torch.jit.ScriptModule, name: str, tensor: torch.Tensor) -> _Undo:
    def undo() -> None:
        if getattr(module, name).untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            setattr(module, name, tensor)

    return undo


__all__ = ["attributes_kept", "buffers_kept", "state_kept"]

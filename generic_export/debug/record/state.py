"""Objects that carry tensors between calls, such as key/value caches: how each class is taken apart and filled again.

In: `StateAdapter`s, registered by whoever knows the class (this package knows no transformers). Out: their look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from generic_export.errors import CaptureError, RegistrationError

_SEARCH_DEPTH = 3


class UnknownStateError(CaptureError):
    """An argument is an object that holds tensors, and nobody said how to take it apart."""


@dataclass(frozen=True)
class StateAdapter:
    """What a diagnosis must know of a class of states.

    Attributes:
        kind: the class; subclasses without an adapter of their own are served too.
        flatten: its tensors by name, such as `key_3`; a slot that is still empty is left out.
        copy: another state of the same class and settings, with the same tensors; writing to it leaves the original alone.
        assign: put tensors, by the names of `flatten`, into a state.
        blank: what a slot that was empty before a call stands for, given what it holds after: a tensor of length 0 along the
            axis that grows. None where there is no such thing.
    """

    kind: type
    flatten: Callable[[Any], Mapping[str, torch.Tensor]]
    copy: Callable[[Any], Any]
    assign: Callable[[Any, Mapping[str, torch.Tensor]], None]
    blank: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _name, _after: None


_ADAPTERS: dict[type, StateAdapter] = {}


def register_state_adapter(adapter: StateAdapter) -> None:
    """Make a class of states known, for as long as the program runs.

    Raises:
        RegistrationError: the class has another adapter already.
    """
    if _ADAPTERS.get(adapter.kind, adapter) != adapter:
        raise RegistrationError(f"{adapter.kind.__name__} has a state adapter already.")
    _ADAPTERS[adapter.kind] = adapter


@contextmanager
def state_adapters(*adapters: StateAdapter) -> Iterator[None]:
    """Make classes of states known for the length of a block."""
    new = [adapter for adapter in adapters if adapter.kind not in _ADAPTERS]
    for adapter in adapters:
        register_state_adapter(adapter)
    try:
        yield
    finally:
        for adapter in new:
            _ADAPTERS.pop(adapter.kind, None)


def adapter_of(value: object) -> StateAdapter | None:
    """Return the adapter of a value's class, or of the nearest class above it."""
    return next((_ADAPTERS[kind] for kind in type(value).__mro__ if kind in _ADAPTERS), None)


def require_known(value: object, name: str) -> None:
    """Refuse an object that holds tensors and has no adapter.

    Raises:
        UnknownStateError: says how to register one.
    """
    if holds_tensors(value):
        kind = type(value)
        raise UnknownStateError(
            f"argument {name!r} is a {kind.__module__}.{kind.__name__}, which holds tensors and is not a known container.",
            "Register it: generic_export.diagnose.register_state_adapter(StateAdapter(kind, flatten, copy, assign)).",
        )


def holds_tensors(value: object, depth: int = _SEARCH_DEPTH) -> bool:
    """Say whether an object has tensors among its attributes, or theirs."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (nn.Module, type)) or callable(value):
        return False
    if isinstance(value, Mapping):
        return any(holds_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(holds_tensors(item, depth - 1) for item in value)
    return any(holds_tensors(item, depth - 1) for item in getattr(value, "__dict__", {}).values())


__all__ = [
    "StateAdapter",
    "UnknownStateError",
    "adapter_of",
    "holds_tensors",
    "register_state_adapter",
    "require_known",
    "state_adapters",
]

"""Free functions that a forward calls by a bare name out of its own file, recorded like modules.

In: modules and their recorder. Out: calls with a path `layers.0.attention:apply_rotary`. Resolved from the globals of the forward;
a function reached in another way (`package.helper()`, a closure) is not seen.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from generic_export.debug.record.recorder import Recorder


class FunctionModule(nn.Module):
    """A free function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.forward = function  # as it is: names and defaults of its parameters are wanted


@contextmanager
def watched_functions(
    modules: Sequence[nn.Module], recorder: Recorder, leave_out: Collection[str] = ()
) -> Iterator[None]:
    """Record the functions that the forwards of some modules call, for the length of the block."""
    with ExitStack() as stack:
        done: set[tuple[int, str]] = set()
        for kind in dict.fromkeys(type(module) for module in modules):
            _watch(inspect.unwrap(kind.forward), recorder, frozenset(leave_out), stack, done)
        yield


def _watch(
    caller: Any, recorder: Recorder, leave_out: frozenset[str], stack: ExitStack, done: set[tuple[int, str]]
) -> None:
    code, names = getattr(caller, "__code__", None), getattr(caller, "__globals__", {})
    if code is None or str(names.get("__name__", "")).split(".")[0] == "torch":
        return
    for name in code.co_names:
        function: Any = names.get(name)
        if (id(names), name) in done or name in leave_out or not _is_own_function(function, names):
            continue
        done.add((id(names), name))
        stack.callback(names.__setitem__, name, function)
        names[name] = _watched(function, name, recorder)
        _watch(inspect.unwrap(function), recorder, leave_out, stack, done)


def _is_own_function(function: object, names: dict[str, Any]) -> bool:
    return isinstance(function, types.FunctionType) and function.__module__ == names.get("__name__")


def _watched(function: Callable[..., Any], name: str, recorder: Recorder) -> Callable[..., Any]:
    def path() -> str | None:
        if torch.compiler.is_compiling() or not recorder.stack or recorder.muted:
            return None
        return f"{recorder.stack[-1].path.partition(':')[0]}:{name}"

    return recorder.watched(function, FunctionModule(function), name, path)


__all__ = ["FunctionModule", "watched_functions"]

"""A model watched for the length of a block: which of its modules, and with which of their methods.

In: a model and what to trace of it. Out: `Watch` before the block, whose `recording` is filled by whoever runs the model in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from torch import nn

from generic_export.debug.record.observe import visible_modules
from generic_export.debug.record.pieces import Case
from generic_export.debug.record.recorder import Recorder, watched_functions
from generic_export.debug.record.recording import Recording, all_paths
from generic_export.debug.record.store import TensorStore
from generic_export.errors import OptionError
from generic_export.sizes import parse_size
from generic_export.torch_graph.methods import as_forward

TracedMethod = Mapping[type[nn.Module] | str, str | None]
"""`{class or class name: method}`: another method than forward; None or "" leaves the class and everything in it out."""

_BUDGET = "4GiB"


@dataclass(frozen=True)
class Watch:
    """What is watched.

    Attributes:
        recording: filled while the model runs.
        methods: of modules of which another method than forward is traced.
    """

    recording: Recording
    methods: Mapping[nn.Module, str]


def watch_of(model: nn.Module, traced_method: TracedMethod | None) -> Watch:
    """Choose what is watched.

    Raises:
        OptionError: a class has no such method, or the model itself is left out.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, not an nn.Module.")
    traced = traced_method or {}
    if not method_of(model, traced):
        raise OptionError(f"traced_method leaves {type(model).__name__} itself out: nothing is traced.")
    visible = visible_modules(model, lambda _: False, lambda module: not method_of(module, traced))
    methods = {module: method for module in visible if (method := method_of(module, traced)) and method != "forward"}
    for module, method in methods.items():
        if not callable(getattr(module, method, None)):
            raise OptionError(f"{type(module).__name__} has no method {method!r} to trace.")
    recording = Recording(model, TensorStore(parse_size(_BUDGET)))
    paths = all_paths(model)
    recording.paths = {module: paths[module] for module in visible}
    return Watch(recording, methods)


def method_of(module: nn.Module, traced_method: TracedMethod) -> str | None:
    """Return the method of a module that is traced; None or "" for none."""
    kind = type(module)
    return traced_method.get(kind, traced_method.get(kind.__name__, "forward"))


@contextmanager
def watching(watch: Watch, functions: bool = False, leave_out: Collection[str] = ()) -> Iterator[None]:
    """Record what runs in the block.

    Args:
        watch: what is watched.
        functions: also functions that a forward calls by a bare name out of its own file.
        leave_out: names of such functions to leave alone.
    """
    recording = watch.recording
    recorder = Recorder(recording, max_calls=1 << 31, skip=())
    with ExitStack() as stack:
        stack.enter_context(recorder.attached([module for module in recording.paths if module not in watch.methods]))
        for module, method in watch.methods.items():
            path = recording.paths[module][0]
            watched = recorder.watched(getattr(module, method), module, type(module).__name__, path)
            stack.enter_context(mock.patch.object(module, method, watched))
        if functions:
            stack.enter_context(watched_functions(list(recording.paths), recorder, leave_out))
        yield


def with_method(case: Case, method: str) -> Case:
    """Return a case of which the method that was traced is the forward."""
    return replace(case, module=as_forward(case.module, method))


__all__ = ["TracedMethod", "Watch", "method_of", "watch_of", "watching", "with_method"]

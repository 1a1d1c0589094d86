"""A model run on several input sets while every module is watched.

In: a model and input sets. Out: the root `ModelDiagnoseOutput`. Forwards are watched with hooks; another method than forward, which
`traced_method` asks for, is replaced on the instance for the length of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.diagnose.piece_by_piece.tree import ModelDiagnoseOutput, build_tree
from generic_export.diagnose.record.functions import watched_functions
from generic_export.diagnose.record.observe import InputSet, as_call
from generic_export.diagnose.record.recorder import Recorder
from generic_export.diagnose.record.recording import Recording, all_paths
from generic_export.diagnose.record.store import TensorStore
from generic_export.errors import OptionError
from generic_export.sizes import parse_size

TracedMethod = Mapping[type[nn.Module] | str, str | None]
"""`{class or class name: method}`: another method than forward; None leaves the class and everything in it out."""

_BUDGET = "4GiB"


class Trace:
    """What `trace_forward_execution` gives: `root` is there once the block is left."""

    def __init__(self) -> None:
        self._root: ModelDiagnoseOutput | None = None

    @property
    def root(self) -> ModelDiagnoseOutput:
        """The tree.

        Raises:
            OptionError: the block is still running.
        """
        if self._root is None:
            raise OptionError("the tree of a trace is there once its block is left.")
        return self._root


@contextmanager
def trace_forward_execution(
    model: nn.Module,
    verbose: int = 0,
    traced_method: TracedMethod | None = None,
    trace_functions: bool = False,
    black_list_functions: Collection[str] | None = None,
) -> Iterator[Trace]:
    """Watch a model for the length of a block.

    Args:
        model: any module; the block runs it.
        verbose: not used.
        traced_method: see `TracedMethod`.
        trace_functions: also watch functions that a forward calls by a bare name out of its own file.
        black_list_functions: names of functions to leave alone.

    Raises:
        OptionError: a class has no such method.
    """
    del verbose
    methods, visible = _chosen(model, traced_method or {})
    recording = Recording(model, TensorStore(parse_size(_BUDGET)))
    recording.paths = {module: paths for module, paths in all_paths(model).items() if module in visible}
    recorder = Recorder(recording, max_calls=1 << 31, skip=())
    trace = Trace()
    with ExitStack() as stack:
        stack.enter_context(recorder.attached([module for module in visible if module not in methods]))
        for module, method in methods.items():
            path = recording.paths[module][0]
            watched = recorder.watched(getattr(module, method), module, type(module).__name__, path)
            stack.enter_context(mock.patch.object(module, method, watched))
        if trace_functions:
            stack.enter_context(watched_functions(list(visible), recorder, black_list_functions or ()))
        yield trace
    trace._root = build_tree(recording, methods)


def trace_execution_piece_by_piece(
    model: nn.Module,
    inputs: Sequence[InputSet],
    verbose: int = 0,
    traced_method: TracedMethod | None = None,
    trace_functions: bool = False,
    black_list_functions: Collection[str] | None = None,
) -> ModelDiagnoseOutput:
    """Run a model on input sets and return what every module received and returned.

    Args:
        model: any module; it is run in eval mode.
        inputs: per set a dict of keywords, a tuple of positionals, or a pair of both; sizes should differ.
        verbose, traced_method, trace_functions, black_list_functions: see `trace_forward_execution`.

    Raises:
        OptionError: there is no input set, or it is none of these forms.
    """
    if not inputs:
        raise OptionError("no input sets were given.", "Give two or more of different sizes.")
    calls = [as_call(given) for given in inputs]
    with (
        trace_forward_execution(model, verbose, traced_method, trace_functions, black_list_functions) as trace,
        evaluation_mode(model),
        torch.no_grad(),
    ):
        method = _method_of(model, traced_method or {}) or "forward"
        run = model if method == "forward" else getattr(model, method)
        for args, kwargs in calls:
            run(*args, **kwargs)
    return trace.root


def _method_of(module: nn.Module, traced_method: TracedMethod) -> str | None:
    kind = type(module)
    return traced_method.get(kind, traced_method.get(kind.__name__, "forward"))


def _chosen(model: nn.Module, traced_method: TracedMethod) -> tuple[dict[nn.Module, str], dict[nn.Module, None]]:
    """Return the modules with another method, and all that are watched, in order."""
    methods: dict[nn.Module, str] = {}
    visible: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        method = _method_of(module, traced_method)
        if method is None or module in visible:
            return
        if not callable(getattr(module, method, None)):
            raise OptionError(f"{type(module).__name__} has no method {method!r} to trace.")
        visible[module] = None
        if method != "forward":
            methods[module] = method
        for child in module.children():
            visit(child)

    visit(model)
    if model not in visible:
        raise OptionError(f"traced_method leaves {type(model).__name__} itself out: nothing is traced.")
    return methods, visible


__all__ = ["Trace", "TracedMethod", "trace_execution_piece_by_piece", "trace_forward_execution"]

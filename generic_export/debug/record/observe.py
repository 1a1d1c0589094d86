"""A model watched while it runs: by its user inside `with observe(model) as recording`, or here on input sets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.compat import compiled_module
from generic_export.debug.record.recorder import Recorder, watched_functions
from generic_export.debug.record.recording import ObservationError, RecordedCall, Recording, all_paths
from generic_export.debug.record.store import TensorStore, checksum
from generic_export.errors import OptionError
from generic_export.sizes import parse_size
from generic_export.torch_graph.state import state_kept

DEFAULT_BUDGET = "2GiB"


@contextmanager
def observe(
    model: nn.Module,
    *,
    max_calls: int = 3,
    budget: str | int = DEFAULT_BUDGET,
    functions: bool = False,
    skip: Collection[type[nn.Module]] = (),
) -> Iterator[Recording]:
    """Record what happens inside a model while the block runs it.

    Args:
        model: any module, on any device; it is run by the block, not here.
        max_calls: how many calls of the model are recorded; later ones pass unrecorded.
        budget: bytes of tensors that are kept, such as `2GiB`; beyond it calls after a module's first leave checksums.
        functions: also record functions that a forward calls by a bare name out of its own file.
        skip: classes that are recorded as a whole, nothing inside.

    Raises:
        OptionError: an argument makes no sense.
        ObservationError: the model is run by two threads.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, not an nn.Module.")
    if max_calls < 1:
        raise OptionError(f"max_calls is {max_calls}.", "Record at least one call.")
    recording = Recording(model, TensorStore(parse_size(budget)), paths=all_paths(model))
    recorder = Recorder(recording, max_calls=max_calls, skip=tuple(skip))
    if any(module.training for module in model.modules()):
        recording.warn(f"{type(model).__name__} was recorded in training mode; modules are tried in eval mode.")
    modules = visible_modules(model, lambda module: isinstance(module, tuple(skip)))
    with ExitStack() as stack:
        stack.enter_context(recorder.attached(modules))
        if functions:
            stack.enter_context(watched_functions(modules, recorder))
        yield recording
    if not recording.calls:
        recording.warn(f"{type(model).__name__} was not called.")


def visible_modules(
    model: nn.Module, is_whole: Callable[[nn.Module], bool], is_left_out: Callable[[nn.Module], bool] = lambda _: False
) -> list[nn.Module]:
    """Return the modules to hook, in order: none inside a compiled or scripted one.

    Args:
        model: the root, which is always there.
        is_whole: says that nothing inside a module is wanted.
        is_left_out: says that a module is not wanted, nor what is inside.
    """
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or (module is not model and _is_hidden(module, is_left_out)):
            return
        found[module] = None
        if not is_whole(module) and not _is_opaque(module):
            for child in module.children():
                visit(child)

    visit(model)
    return list(found)


def _is_hidden(module: nn.Module, is_left_out: Callable[[nn.Module], bool]) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or is_left_out(module)


def _is_opaque(module: nn.Module) -> bool:
    """Say whether what is inside runs in a form that hooks would change or not see."""
    return compiled_module(module) is not None or isinstance(module, torch.jit.ScriptModule)


InputSet = Mapping[str, Any] | tuple[Any, ...]
"""Keywords, or positionals, or `(positionals, keywords)`."""


def record(
    model: nn.Module, input_sets: Sequence[InputSet] | None, *, functions: bool = False, budget: str | int = "2GiB"
) -> Recording:
    """Run a model in eval mode on input sets and record it.

    Raises:
        OptionError: there are no input sets.
        UnknownStateError, ObservationError: the model cannot be recorded.
    """
    if not input_sets:
        raise OptionError("no inputs were given.", "Pass two or more calls of different sizes, or a recording.")
    with (
        observe(model, max_calls=len(input_sets), budget=budget, functions=functions) as recording,
        evaluation_mode(model),
        state_kept(model),
        torch.no_grad(),
    ):
        for given in input_sets:
            args, kwargs = as_call(given)
            model(*args, **kwargs)
    return recording


def as_call(given: InputSet) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an input set as positional and keyword arguments."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return given[0], dict(given[1])
    if isinstance(given, tuple):
        return given, {}
    raise OptionError(
        f"an input is a {type(given).__name__}.",
        "Pass a dict of keywords, a tuple, or a pair of a tuple and a dict.",
    )


def completed(recording: Recording, recorded: RecordedCall) -> RecordedCall:
    """Return a call with all its tensors: those beyond the budget are made again by running its set once more.

    Raises:
        ObservationError: run again, the model computes other numbers.
    """
    if recorded.whole:
        return recorded
    root = next(r for r in recording.roots() if r.call.set_index == recorded.call.set_index)
    module = recorded.module
    store = TensorStore(sys.maxsize)
    again = Recording(recording.model, store, paths={module: recording.paths.get(module, (recorded.call.path,))})
    recorder = Recorder(again, max_calls=1, skip=())
    tensors = root.inputs()
    args, kwargs = root.arguments.rebuilt(lambda name: tensors[name].clone())
    with recorder.attached([root.module, module] if module is not root.module else [module]), torch.no_grad():
        root.module(*args, **kwargs)
    found = next((r for r in again.calls if r.module is module and r.call.turn == recorded.call.turn), None)
    if found is None or not _same_checksums(recorded, found):
        raise ObservationError(
            f"{recorded.call.path or '(root)'}: a second run of {recorded.call.class_name} computes different values.",
            "Raise the budget of observe(), so that nothing has to be recomputed.",
        )
    return replace(found, call=recorded.call)


def _same_checksums(before: RecordedCall, again: RecordedCall) -> bool:
    for old, new in zip(before.groups(), again.groups(), strict=True):
        for name, held in old.items():
            fresh = new[name].tensor if name in new else None
            if fresh is None or (held.checksum and checksum(fresh) != held.checksum):
                return False
    return True


__all__ = ["InputSet", "as_call", "completed", "observe", "record", "visible_modules"]

"""The hooks that watch a running model, and the stack of the calls that are going on.

In: modules whose owner runs them. Out: calls in a `Recording`. No forward is replaced, so wrappers, `generate()` and
signatures stay as they are, and leaving `attached` takes every hook away.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from generic_export.debug.record.leaves import (
    Layout,
    call_layout,
    named_arguments,
    result_layout,
    tensors_in,
    with_blank_slots,
)
from generic_export.debug.record.recording import Call, ObservationError, RecordedCall, Recording
from generic_export.debug.record.state import holds_tensors
from generic_export.debug.record.store import Held, version_of
from generic_export.debug.records import Leaf, LeafKind
from generic_export.torch_graph.untraced_calls import is_untraced


@dataclass
class _Frame:
    """A call that is going on."""

    index: int
    set_index: int
    turn: int
    path: str
    name: str
    source: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward: Callable[..., Any]
    arguments: Layout
    held: dict[str, Held]
    before: dict[str, tuple[torch.Tensor, int]]
    essential: bool
    outer_error: BaseException | None
    began: float


class Recorder:
    """The hooks and the stack of calls that are going on."""

    def __init__(self, recording: Recording, *, max_calls: int, skip: tuple[type[nn.Module], ...]) -> None:
        self.recording = recording
        self.max_calls = max_calls
        self.skip = skip
        self.stack: list[_Frame] = []
        self.owner: int | None = None
        self.next_index = 0
        self.next_set = 0
        self.turns: Counter[tuple[int, str]] = Counter()
        self.seen: set[str] = set()
        self.muted: list[nn.Module] = []

    @contextmanager
    def attached(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Hook modules for the length of a block."""
        with ExitStack() as stack:
            for module in modules:
                for handle in self._hooks(module):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, module: nn.Module) -> list[Any]:
        # A ScriptModule refuses these methods of its own, yet runs the hooks of an nn.Module like any other.
        before = nn.Module.register_forward_pre_hook(module, self._before, with_kwargs=True)
        after = nn.Module.register_forward_hook(module, self._after, with_kwargs=True, always_call=True)
        return [before, after]

    def watched(
        self, function: Callable[..., Any], module: nn.Module, name: str, path: str | Callable[[], str | None]
    ) -> Callable[..., Any]:
        """Return a function whose calls are recorded as a module's, at a path that is asked for then; None leaves one out."""

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            place = path if isinstance(path, str) else path()
            if place is None:
                return function(*args, **kwargs)
            self.begin(module, place, name, function, args, kwargs)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self.fail(error)
                raise
            self.end(result)
            return result

        return recorded

    # --- hooks --------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _passes_unseen() or self._is_muted(module):
            return
        path = self.recording.paths.get(module, ("",))[0]
        self.begin(module, path, type(module).__name__, module.forward, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _passes_unseen():
            return
        if self.muted:
            if self.muted[-1] is module:
                self.muted.pop()
            return
        if not self.stack or self.stack[-1].module is not module:
            return
        error = sys.exc_info()[1]
        if error is not None and error is not self.stack[-1].outer_error:
            self.fail(error)
        else:
            self.end(output)

    def _is_muted(self, module: nn.Module) -> bool:
        """Say whether a call passes unrecorded, because its root had its share of calls already."""
        if self.muted:
            if self.muted[0] is module:
                self.muted.append(module)
            return True
        if not self.stack and self.next_set >= self.max_calls:
            self.muted.append(module)
            return True
        return False

    # --- calls --------------------------------------------------------------------------------------

    def begin(
        self,
        module: nn.Module,
        path: str,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Note that a call begins."""
        self._check_thread(path)
        if not self.stack:
            set_index, self.next_set = self.next_set, self.next_set + 1
        else:
            set_index = self.stack[-1].set_index
        place = path if ":" in path else str(id(module))
        turn = self.turns[set_index, place]
        self.turns[set_index, place] += 1
        arguments = call_layout(forward, args, kwargs)
        for unknown, value in arguments.unknown.items():
            self._note_unknown(path, unknown, value)
        essential = not self.stack or place not in self.seen
        self.seen.add(place)
        before = {leaf: (tensor, version_of(tensor)) for leaf, tensor in arguments.tensors.items()}
        held = {leaf: self.recording.store.hold(t, essential=essential) for leaf, t in arguments.tensors.items()}
        arguments.release({leaf: kept.tensor for leaf, kept in held.items()})
        frame = _Frame(
            index=self.next_index,
            set_index=set_index,
            turn=turn,
            path=path,
            name=name,
            source=function_source(forward),
            module=module,
            args=args,
            kwargs=kwargs,
            forward=forward,
            arguments=arguments,
            held=held,
            before=before,
            essential=essential,
            outer_error=sys.exc_info()[1],
            began=time.perf_counter(),
        )
        self.next_index += 1
        self.stack.append(frame)

    def end(self, output: Any) -> None:
        """Note what the innermost call returned and wrote to."""
        frame = self.stack.pop()
        seconds = time.perf_counter() - frame.began
        result = result_layout(output)
        after = self._written(frame)
        arguments = self._with_blanks(frame, after)
        store = self.recording.store
        returned = {id(tensor) for tensor in result.tensors.values()}
        extra = tuple(name for name, tensor in after.items() if id(tensor) not in returned)
        results = {name: store.hold(t, essential=frame.essential) for name, t in result.tensors.items()}
        names = {id(tensor): name for name, (tensor, _) in frame.before.items() if name not in after}
        outputs = tuple(_with_alias(leaf, result.tensors, names) for leaf in result.leaves)
        constants = _constants(result)
        result.release({leaf: kept.tensor for leaf, kept in results.items()})
        call = Call(
            index=frame.index,
            set_index=frame.set_index,
            path=frame.path,
            class_name=frame.name,
            parent=self.stack[-1].index if self.stack else None,
            turn=frame.turn,
            source=frame.source,
            inputs=_marked(arguments.leaves, after),
            outputs=outputs,
            seconds=seconds,
        )
        self.recording.calls.append(
            RecordedCall(
                call,
                frame.module,
                arguments,
                result,
                frame.held,
                results,
                {name: store.hold(t, essential=frame.essential) for name, t in after.items()},
                extra,
                constants,
            )
        )
        if not self.stack:
            self.recording.calls.sort(key=lambda recorded: recorded.call.index)

    def fail(self, error: BaseException) -> None:
        """Note that the innermost call raised: the error is told where, once, and its set is forgotten."""
        frame = self.stack.pop()
        notes: list[str] = getattr(error, "__notes__", [])
        if not any("recorded in module" in note for note in notes):
            error.add_note(f"recorded in module {frame.path or '(root)'} ({frame.name}, {frame.source})")
        self.recording.calls = [r for r in self.recording.calls if r.call.set_index != frame.set_index]

    def _check_thread(self, path: str) -> None:
        thread = threading.get_ident()
        if self.owner is None:
            self.owner = thread
        if thread != self.owner:
            raise ObservationError(
                f"{path or '(root)'}: the model is run by a second thread while it is being recorded.",
                "Open one observe() block per run, one after the other.",
            )

    def _note_unknown(self, path: str, name: str, value: Any) -> None:
        if holds_tensors(value):
            kind = type(value).__name__
            self.recording.warn(f"{path or '(root)'}: argument {name!r} is a {kind}, which has no state adapter.")

    def _written(self, frame: _Frame) -> dict[str, torch.Tensor]:
        """Return the inputs that differ after the call, as they are now."""
        aliases = {leaf.name for leaf in frame.arguments.leaves if leaf.alias_of}
        after = tensors_in(named_arguments(frame.forward, frame.args, frame.kwargs)).items()
        return {name: tensor for name, tensor in after if name not in aliases and _is_changed(frame, name, tensor)}

    def _with_blanks(self, frame: _Frame, after: Mapping[str, torch.Tensor]) -> Layout:
        """Return the layout of the arguments in which states that were empty before the call have tensors of length 0."""
        new = [name for name in after if name not in frame.before]
        if not new:
            return frame.arguments
        layout = with_blank_slots(frame.arguments, {name: after[name] for name in new})
        for name, tensor in layout.tensors.items():
            if name not in frame.held:
                frame.held[name] = self.recording.store.hold(tensor, essential=True)
        layout.release({leaf: kept.tensor for leaf, kept in frame.held.items()})
        return layout


def _passes_unseen() -> bool:
    """Say whether calls are no part of the model's run: its shapes are being captured, or a module is only looked at."""
    return torch.compiler.is_compiling() or is_untraced()


def _is_changed(frame: _Frame, name: str, tensor: torch.Tensor) -> bool:
    known = frame.before.get(name)
    if known is None or known[0] is not tensor or version_of(tensor) != known[1]:
        return True
    return known[1] < 0 and not _same_values(tensor, frame.held[name])


def _same_values(tensor: torch.Tensor, held: Held) -> bool:
    return held.tensor is not None and torch.equal(tensor.cpu(), held.tensor)


def _with_alias(leaf: Leaf, tensors: Mapping[str, torch.Tensor], inputs: Mapping[int, str]) -> Leaf:
    tensor = tensors.get(leaf.name)
    return replace(leaf, alias_of=inputs[id(tensor)]) if tensor is not None and id(tensor) in inputs else leaf


def _marked(leaves: Sequence[Leaf], after: Mapping[str, torch.Tensor]) -> tuple[Leaf, ...]:
    return tuple(replace(leaf, written=True) if leaf.name in after else leaf for leaf in leaves)


def _constants(result: Layout) -> dict[str, Any]:
    return {leaf.name: leaf.value for leaf in result.leaves if leaf.kind is not LeafKind.TENSOR}


def function_source(function: Callable[..., Any]) -> str:
    """Return `file.py:line` of a function, decorators looked through; "" for one made in C."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


# Free functions that a forward calls by a bare name out of its own file, recorded like modules.
# In: modules and their recorder. Out: calls with a path `layers.0.attention:apply_rotary`. Resolved from the globals
# of the forward; a function reached in another way (`package.helper()`, a closure) is not seen.
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


__all__ = ["Recorder", "watched_functions"]

"""What every module of a running model receives, returns and writes to.

In: a model, run by its user inside `with observe(model) as recording`. Out: a `Recording`. Hooks only: no forward is replaced,
so wrappers, `generate()` and signatures stay as they are, and leaving the block takes every hook away.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from generic_export.compat import is_compiled
from generic_export.diagnose.record.functions import watched_functions
from generic_export.diagnose.record.layout import (
    Layout,
    argument_names,
    call_layout,
    result_layout,
    take_apart,
    with_blank_slots,
)
from generic_export.diagnose.record.state import holds_tensors
from generic_export.diagnose.record.store import Held, TensorStore, checksum, version_of
from generic_export.diagnose.records import Call, Leaf, LeafKind
from generic_export.errors import CaptureError, OptionError
from generic_export.sizes import parse_size
from generic_export.torch_graph.asides import is_aside

logger = logging.getLogger(__name__)

DEFAULT_BUDGET = "2GiB"


class ObservationError(CaptureError):
    """A model cannot be recorded the way it is run."""


@dataclass
class RecordedCall:
    """One call with its values.

    Attributes:
        call: the record of it.
        module: the module that was called; for a free function, a module that calls it.
        arguments, result: how its values are laid out.
        held: what is kept of each input tensor, by leaf name (states that were empty: tensors of length 0).
        results: the same of each output tensor.
        after: of each input that the call wrote to, as it was afterwards.
        extra: written inputs that are not outputs as well.
        constants: outputs that are no tensors, by leaf name.
    """

    call: Call
    module: nn.Module
    arguments: Layout
    result: Layout
    held: dict[str, Held]
    results: dict[str, Held]
    after: dict[str, Held]
    extra: tuple[str, ...]
    constants: dict[str, Any]

    @property
    def whole(self) -> bool:
        """Whether every tensor is there."""
        return all(held.tensor is not None for group in self.groups() for held in group.values())

    def groups(self) -> tuple[dict[str, Held], ...]:
        """Return the three groups of tensors."""
        return self.held, self.results, self.after

    def result_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and sizes of each tensor that a graph of this call gives back."""
        for leaf in self.call.outputs:
            if leaf.name in self.results:
                yield leaf.name, leaf.sizes
        for name in self.extra:
            yield f"out_{name}", self.after[name].shape

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a graph of this call gives back: outputs, then written inputs."""
        found = {name: held.tensor for name, held in self.results.items()}
        found |= {f"out_{name}": self.after[name].tensor for name in self.extra}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors that go in."""
        return {name: held.tensor for name, held in self.held.items() if held.tensor is not None}


@dataclass
class Recording:
    """All that was observed.

    Attributes:
        model: the model; it is as it was.
        calls: in the order in which they began; those of a set that failed are not among them.
        paths: first path of each module that could be called, and its further ones.
        warnings: what was noticed.
    """

    model: nn.Module
    store: TensorStore
    calls: list[RecordedCall] = field(default_factory=list)
    paths: dict[nn.Module, tuple[str, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    skipped: tuple[str, ...] = ()

    def roots(self) -> list[RecordedCall]:
        """Return the outermost calls: one per input set."""
        return [recorded for recorded in self.calls if recorded.call.parent is None]

    def warn(self, message: str) -> None:
        """Note something once."""
        if message not in self.warnings:
            self.warnings.append(message)
            logger.warning("%s", message)

    def unexercised(self) -> tuple[str, ...]:
        """Return the paths of modules that no set reaches, without those inside one that is listed."""
        called = {id(recorded.module) for recorded in self.calls}
        found = [
            paths[0]
            for module, paths in self.paths.items()
            if id(module) not in called and _has_forward(module) and paths[0]
        ]
        return tuple(p for p in found if not any(p.startswith(f"{other}.") for other in found))

    def completed(self, recorded: RecordedCall) -> RecordedCall:
        """Return a call with all its tensors: those beyond the budget are made again by running its set once more.

        Raises:
            ObservationError: run again, the model computes other numbers.
        """
        if recorded.whole:
            return recorded
        root = next(r for r in self.roots() if r.call.set_index == recorded.call.set_index)
        module = recorded.module
        store = TensorStore(sys.maxsize)
        again = Recording(self.model, store, paths={module: self.paths.get(module, (recorded.call.path,))})
        recorder = Recorder(again, max_calls=1, skip=())
        tensors = root.inputs()
        args, kwargs = root.arguments.rebuilt(lambda name: tensors[name].clone())
        with recorder.attached([root.module, module] if module is not root.module else [module]), torch.no_grad():
            root.module(*args, **kwargs)
        found = next((r for r in again.calls if r.module is module and r.call.turn == recorded.call.turn), None)
        if found is None or not _same_checksums(recorded, found):
            raise ObservationError(
                f"{recorded.call.path or '(root)'}: run again, {recorded.call.class_name} computes other numbers.",
                "Raise the budget of observe(), so that nothing has to be computed again.",
            )
        return replace(found, call=recorded.call)


def _same_checksums(before: RecordedCall, again: RecordedCall) -> bool:
    for old, new in zip(before.groups(), again.groups(), strict=True):
        for name, held in old.items():
            fresh = new[name].tensor if name in new else None
            if fresh is None or (held.checksum and checksum(fresh) != held.checksum):
                return False
    return True


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
    recording.skipped = tuple(kind.__name__ for kind in skip)
    recorder = Recorder(recording, max_calls=max_calls, skip=tuple(skip))
    if any(module.training for module in model.modules()):
        recording.warn(f"{type(model).__name__} was recorded in training mode; pieces are tried in eval mode.")
    modules = _visible_modules(model, tuple(skip))
    with ExitStack() as stack:
        stack.enter_context(recorder.attached(modules))
        if functions:
            stack.enter_context(watched_functions(modules, recorder))
        yield recording
    if not recording.calls:
        recording.warn(f"{type(model).__name__} was not called.")


def all_paths(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    paths: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module] = (*paths.get(module, ()), path)
    return paths


def _visible_modules(model: nn.Module, skip: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Return the modules to hook: none inside a skipped, compiled or scripted one."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found:
            return
        found[module] = None
        if not isinstance(module, skip) and not _is_opaque(module):
            for child in module.children():
                visit(child)

    visit(model)
    return [module for module in found if not isinstance(module, torch.jit.ScriptModule) or module is model]


def _is_opaque(module: nn.Module) -> bool:
    """Say whether what is inside runs in a form that hooks would change or not see."""
    return is_compiled(module) or isinstance(module, torch.jit.ScriptModule)


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


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
        before = module.register_forward_pre_hook(self._before, with_kwargs=True)
        after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        return [before, after]

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
            _add_note(error, f"recorded in module {frame.path or '(root)'} ({frame.name}, {frame.source})")
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
        _, now = take_apart(_named_arguments(frame), keep_states=False)
        aliases = {leaf.name for leaf in frame.arguments.leaves if leaf.alias_of}
        after = now.named_tensors().items()
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
    return torch.compiler.is_compiling() or is_aside()


def _named_arguments(frame: _Frame) -> list[tuple[str, Any]]:
    names = argument_names(frame.forward, frame.args, frame.kwargs)
    return [*zip(names, frame.args, strict=True), *frame.kwargs.items()]


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


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def function_source(function: Callable[..., Any]) -> str:
    """Return `file.py:line` of a function, decorators looked through; "" for one made in C."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


__all__ = ["ObservationError", "RecordedCall", "Recorder", "Recording", "all_paths", "function_source", "observe"]

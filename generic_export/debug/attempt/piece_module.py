"""One piece as a module that `torch.export` can capture: flat tensors in, flat tensors out, states and all.

In: a `Case`. Out: `PieceModule`, whose forward puts the arguments together, calls the piece, and returns its outputs, then
whatever the call wrote to. With `opaque` its children are not run: what they returned when recorded comes in as inputs, and what
they are given goes out as outputs, so that the piece's own code is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from generic_export.capture import Prepared, prepare
from generic_export.debug.attempt.graph_inputs import Feed
from generic_export.debug.record.axes import Form
from generic_export.debug.record.leaves import (
    belongs,
    named_arguments,
    result_layout,
    state_names,
    take_apart,
    tensors_in,
    write_into,
)
from generic_export.debug.record.pieces import Case
from generic_export.debug.record.recording import RecordedCall
from generic_export.errors import CaptureError
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.torch_graph.dims import Dim
from generic_export.torch_graph.fusion import Fusion
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.naming import identifier
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.state import state_kept
from generic_export.torch_graph.untraced_calls import is_untraced
from generic_export.torchscript.fallback import Around, script_of

PIECE = "piece"
"""The attribute that holds the piece; it is not part of names in the graph."""


class PieceModule(Around):
    """A piece with flat inputs and outputs.

    Args:
        case: the piece.
        recorded: the call that says how arguments and results are laid out.
        feed: the inputs; None plans them.
        opaque: take the results of children as inputs.
    """

    def __init__(self, case: Case, recorded: RecordedCall, feed: Feed | None = None, *, opaque: bool = False) -> None:
        super().__init__()
        self.piece = case.module
        self._case = case
        self._recorded = recorded
        self._opaque = opaque
        self.feed = feed or self._planned_feed()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the piece on the tensors of the feed."""
        return tuple(self.results(self.feed.leaves(tensors)).values())

    def leaves(self, recorded: RecordedCall) -> dict[str, torch.Tensor]:
        """Return the tensors of one call that go into a graph of the piece."""
        leaves = recorded.inputs()
        return leaves | dict(_child_results(self._case, recorded)) if self._opaque else leaves

    def examples(self, *, dynamic: bool = True) -> tuple[torch.Tensor, ...]:
        """Return what it is captured with; where no axis is dynamic, the tensors of the call."""
        leaves = self.leaves(self._recorded)
        return self.feed.examples(leaves) if dynamic else tuple(self.feed.inputs(leaves).values())

    def dynamic_axes(self, *, dynamic: bool = True) -> DynamicAxes:
        """Return the axes that stay symbolic."""
        return self.feed.dynamic_axes() if dynamic else {}

    def around(self, piece: nn.Module, recorded: RecordedCall) -> PieceModule:
        """Return the same around what stands for the piece, laid out as another call."""
        made = type(self)(self._case, recorded, self.feed, opaque=self._opaque)
        made.piece = piece
        return made.eval()

    def scripted(self) -> PieceModule | None:
        """Return it around the script of the piece, whose children are in it; None where that has none."""
        inputs = self._recorded.inputs()
        script = None if self._opaque else script_of(self.piece, *self._recorded.arguments.rebuilt(inputs.__getitem__))
        return None if script is None else self.around(script, self._recorded)

    def answers(self, recorded: RecordedCall, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Run the piece on a call, which stays as it was, with floats of another type if one is given."""
        leaves = self.leaves(recorded)
        copies = {
            n: t.to(dtype, copy=True) if dtype and t.is_floating_point() else t.clone() for n, t in leaves.items()
        }
        with state_kept(self.piece):
            results = self.around(self.piece, recorded).results(copies)
            return {name: tensor.detach().clone() for name, tensor in results.items()}

    def results(self, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the piece on leaves; returns its outputs, what it wrote to, and in `opaque` what its children were given."""
        recorded = self._recorded
        copies = {leaf: tensor.clone() if leaf in recorded.after else tensor for leaf, tensor in leaves.items()}
        args, kwargs = recorded.arguments.rebuilt(copies.__getitem__)
        given: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            if self._opaque:
                stack.enter_context(_recorded_children(self._case, recorded, leaves, given))
            result = self.piece(*args, **kwargs)
        found = result_layout(result).tensors
        after = tensors_in(named_arguments(self._case.module.forward, args, kwargs))
        outputs = {name: _given(found, name) for name in recorded.results}
        outputs |= {f"out_{name}": _given(after, name) for name in recorded.extra}
        return outputs | given

    def _planned_feed(self) -> Feed:
        case, leaves = self._case, self.leaves(self._recorded)
        forms = {leaf: case.forms[leaf] for leaf in case.calls[0].held}
        forms |= _child_forms(case) if self._opaque else {}
        return Feed.of(forms, {name: leaves[name].dtype for name in forms})


def piece_module(case: Case, recorded: RecordedCall, *, opaque: bool = False) -> PieceModule:
    """Return a piece as a module whose class bears the piece's name, which errors then tell.

    Raises:
        UnknownStateError: an argument is an object that nobody can take apart.
    """
    recorded.arguments.require_known()
    kind: type[PieceModule] = type(case.piece.class_name, (PieceModule,), {})
    return kind(case, recorded, opaque=opaque).eval()


def calls_for(case: Case, *, dynamic: bool) -> tuple[RecordedCall, ...]:
    """Return the calls that an export of a piece is made and compared with: without dynamic axes the very first."""
    return case.calls if dynamic else (min(case.calls, key=lambda recorded: recorded.call.index),)


def prepare_piece(
    module: PieceModule,
    target: TractNNEF,
    output_names: Sequence[str] | None,
    *,
    dynamic: bool,
    fusions: Sequence[Fusion],
    torchscript: bool,
) -> Prepared:
    """Capture a piece as an export captures a module.

    Args:
        module: the piece.
        target: what it is exported for; its dynamic axes are replaced by those of the piece.
        output_names: None for names that the capture chooses.
        dynamic, fusions, torchscript: see `AttemptOptions`.
    """
    names = [part.name for part in module.feed.parts]
    prepared = prepare(
        module,
        module.examples(dynamic=dynamic),
        replace(target, dynamic_axes=module.dynamic_axes(dynamic=dynamic), check_io=False),
        names,
        None if output_names is None else _beside(names, output_names),
        allow_same_io_names=True,
        fusions=fusions,
        strip_prefix=f"{PIECE}.",
        torchscript=torchscript,
    )
    return replace(prepared, graph=_without_unread_states(prepared.graph))


def _beside(taken: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return names that are written like none of those taken, nor like each other."""
    known = {identifier(name) for name in taken}
    found = []
    for name in names:
        while identifier(name) in known:
            name = f"out_{name}"
        known.add(identifier(name))
        found.append(name)
    return found


def _without_unread_states(graph: TorchModuleIRGraph) -> TorchModuleIRGraph:
    """Leave out inputs that nothing reads, as the parts of a cache that belong to other layers, unless a size is known by them."""
    used = {tensor.name for op in graph.ops for tensor in op.tensor_inputs()} | {out.name for out in graph.outputs}
    kept = [variable for variable in graph.inputs if variable.name in used]
    known = {dim for variable in kept for dim in variable.shape if not isinstance(dim, int)}
    for variable in graph.inputs:
        if variable.name not in used and any(_is_new(dim, known) for dim in variable.shape):
            known |= {dim for dim in variable.shape if not isinstance(dim, int)}
            kept.append(variable)
    names = {variable.name for variable in kept} or {variable.name for variable in graph.inputs}
    return replace(graph, inputs=tuple(variable for variable in graph.inputs if variable.name in names))


def _is_new(dim: Dim, known: set[Any]) -> bool:
    return not isinstance(dim, int) and dim not in known


def _given(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise CaptureError(f"run separately, the module returns no {name!r}, unlike in the recording.")
    return tensors[name]


# --- children that are not run ----------------------------------------------------------------------


def _child_results(case: Case, recorded: RecordedCall) -> Iterator[tuple[str, torch.Tensor]]:
    for number, inner in enumerate(_modules_in(case, recorded)):
        for name, held in (*inner.results.items(), *inner.after.items()):
            if held.tensor is not None:
                yield _child_leaf(number, name), held.tensor


def _modules_in(case: Case, recorded: RecordedCall) -> list[RecordedCall]:
    """Return the direct children that are modules: a free function is code of the piece itself."""
    return [inner for inner in case.inner[recorded.call.index] if ":" not in inner.call.path]


def _child_leaf(number: int, name: str) -> str:
    return f"child_{number}.{name}"


def _child_forms(case: Case) -> dict[str, tuple[Form, ...]]:
    sizes: dict[str, list[list[tuple[int, int]]]] = {}
    turn = case.calls[0].call.turn
    for recorded in case.calls:
        if recorded.call.turn != turn:
            continue
        for name, tensor in _child_results(case, recorded):
            axes = sizes.setdefault(name, [[] for _ in tensor.shape])
            for axis, size in zip(axes, tensor.shape, strict=True):
                axis.append((recorded.call.set_index, int(size)))
    return {name: tuple(case.symbols.named(axis, n) for n, axis in enumerate(axes)) for name, axes in sizes.items()}


@contextmanager
def _recorded_children(
    case: Case, recorded: RecordedCall, leaves: dict[str, torch.Tensor], given: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Let the direct children return recorded results; `given` gets what they are called with."""
    waiting: dict[int, list[tuple[int, RecordedCall]]] = {}
    for number, inner in enumerate(_modules_in(case, recorded)):
        waiting.setdefault(id(inner.module), []).append((number, inner))
    with ExitStack() as stack:
        for module in case.module.modules():
            if id(module) in waiting and module is not case.module:
                replacement = _replayed(module.forward, waiting[id(module)], leaves, given)
                stack.enter_context(mock.patch.object(module, "forward", replacement))
        yield


def _replayed(
    original: Callable[..., Any],
    calls: list[tuple[int, RecordedCall]],
    leaves: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
) -> Callable[..., Any]:
    turns = iter(calls)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_untraced():  # it was not recorded either
            return original(*args, **kwargs)
        number, inner = next(turns)
        named = named_arguments(type(inner.module).forward, (None, *args), kwargs)[1:]
        _, now = take_apart(named, keep_states=False)
        states = state_names(inner.arguments)
        for name in inner.held:
            if name in now.tensors and not belongs(name, states):
                given[f"to_{_child_leaf(number, name)}"] = now.tensors[name]
        for name in inner.after:
            write_into(named, name, leaves[_child_leaf(number, name)])
        return inner.result.rebuilt(lambda name: leaves[_child_leaf(number, name)])

    return forward


__all__ = ["PIECE", "PieceModule", "calls_for", "piece_module", "prepare_piece"]

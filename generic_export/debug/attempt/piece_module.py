"""One piece as a module that `torch.export` can capture: flat tensors in, flat tensors out, states and all.

In: a `Case`. Out: `PieceModule`, whose forward puts the arguments together, calls the piece, and returns its outputs, then
whatever the call wrote to. With `opaque` its children are not run: what they returned when recorded comes in as inputs, and what
they are given goes out as outputs, so that the piece's own code is all there is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from generic_export.capture import as_stored
from generic_export.compare.comparison import Comparison, MeasuredTolerance
from generic_export.compat import buffers_of
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
from generic_export.inference_target.example import ExampleRun, as_array
from generic_export.torch_graph.request import DynamicAxes
from generic_export.torch_graph.state import state_kept
from generic_export.torch_graph.untraced_calls import is_untraced
from generic_export.torchscript.fallback import Around, script_of

logger = logging.getLogger(__name__)

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


def _given(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise CaptureError(f"run alone, the piece gives no {name!r}, as it did when it was recorded.")
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


def compared(
    tolerance: MeasuredTolerance,
    module: PieceModule,
    call: RecordedCall,
    example: ExampleRun,
    answers: Sequence[np.ndarray],
) -> Iterator[Comparison]:
    """Compare every output of a call with PyTorch's; where rounding may be the cause, PyTorch's float64 shows how much."""

    @cache
    def exact() -> list[np.ndarray] | None:
        """Return the outputs computed in float64, when first asked; None where the piece insists on an element type."""
        try:
            with in_float64(module.piece):
                return [as_array(as_stored(tensor)) for tensor in module.answers(call, torch.float64).values()]
        except Exception as error:  # whatever the model's code raises
            logger.info("%s cannot be computed in float64: %s", type(module).__name__, error)
            return None

    triples = zip(example.output_names, answers, example.outputs, strict=True)
    for position, (name, answer, reference) in enumerate(triples):

        def precise(position: int = position) -> np.ndarray | None:
            known = exact()
            return None if known is None else known[position]

        found = tolerance.compare(name, answer, reference, _dtype_of(call, reference), precise)
        yield replace(found, set_index=call.call.set_index)


def _dtype_of(recorded: RecordedCall, reference: np.ndarray) -> str:
    """Return the element type that PyTorch computes in: bf16 when the piece was recorded in it."""
    recorded_in_bf16 = any(leaf.dtype == "bfloat16" for leaf in (*recorded.call.inputs, *recorded.call.outputs))
    return "bfloat16" if recorded_in_bf16 and reference.dtype == np.float32 else str(reference.dtype)


# The numbers of a piece: made up where there are none, and widened for a second opinion on PyTorch's own rounding.
# In: a module, which is changed (in a worker process, that is nobody else's). Out: the same module.
@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Let a module compute in float64 for a block; its own tensors are put back after it."""
    parameters = [(parameter, parameter.data) for parameter in module.parameters()]
    buffers = [(inner, name, buffer) for inner in module.modules() for name, buffer in buffers_of(inner).items()]
    try:
        module.double()
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for inner, name, buffer in buffers:
            buffers_of(inner)[name] = buffer


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def fill_with_random(module: nn.Module) -> None:
    """Give a module on the meta device random weights of the usual size."""
    was_meta = {name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta}
    values = {name: tensor for name, tensor in module.named_buffers() if not tensor.is_meta}
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in values:
            tensor.copy_(values[name])
        elif name in was_meta:
            fan_in = tensor.shape[-1] if tensor.ndim > 1 else 1
            fresh = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) / fan_in**0.5
            tensor.data.copy_(fresh if tensor.ndim > 1 else 1.0 + 0.1 * fresh)


__all__ = ["PIECE", "PieceModule", "calls_for", "compared", "fill_with_random", "piece_module", "random_like"]

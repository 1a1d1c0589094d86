"""What PyTorch computes for a piece: the outputs that those of the engine are compared with.

In: a `Case` and its recorded calls. Out: a `PyTorchRun` a call, and its arrays. Numbers that the engine cannot take are replaced
first: bfloat16 becomes f32, and a piece on the meta device gets random weights and inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import nn

from generic_export.capture import as_stored
from generic_export.compare.comparison import Comparison, MeasuredTolerance
from generic_export.compat import buffers_of
from generic_export.debug.attempt.piece_module import PieceModule
from generic_export.debug.privacy import redacted
from generic_export.debug.record.pieces import Case
from generic_export.debug.record.recording import RecordedCall
from generic_export.errors import CaptureError, T2NError
from generic_export.inference_target.example import ExampleRun, as_array
from generic_export.torch_graph.ir import TorchModuleIRGraph

logger = logging.getLogger(__name__)


class NonDeterministicError(CaptureError):
    """The same inputs give other outputs the second time."""


@dataclass(frozen=True)
class PyTorchRun:
    """What PyTorch computes for a call.

    Attributes:
        call: its inputs.
        outputs: by name.
    """

    call: RecordedCall
    outputs: Mapping[str, torch.Tensor]


class PyTorchRuns:
    """Runs of a piece alone in PyTorch.

    Args:
        case: the piece.
        notes: receives what a reader of the verdict should know.
        isolated: the piece's children are not run.
    """

    def __init__(self, case: Case, notes: list[str], *, isolated: bool) -> None:
        self._case, self._notes, self._isolated = case, notes, isolated

    def prepare_weights(self, most_bytes: int) -> None:
        """Widen bf16, which the engine does not have; make random weights where there are none.

        Args:
            most_bytes: a larger piece gets no random weights.
        """
        module = self._case.module
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if size <= most_bytes and self._case.piece.path:
                fill_with_random(module)
                self._notes.append("run with random weights")
        if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
            module.float()
            self._notes.append("computed in float32, because the engine has no bfloat16")

    def plain_call(self, recorded: RecordedCall) -> RecordedCall:
        """Return a call whose tensors are as the piece is tried with: f32 for bf16, random for meta."""
        has_weights = not any(tensor.is_meta for tensor in self._case.module.parameters())
        generator = torch.Generator().manual_seed(0)

        def plain(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta and has_weights:
                tensor = random_like(tensor, generator)
            return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

        held = {
            name: replace(kept, tensor=None if kept.tensor is None else plain(kept.tensor))
            for name, kept in recorded.held.items()
        }
        return replace(recorded, held=held)

    def run(self, module: PieceModule, calls: Sequence[RecordedCall]) -> list[PyTorchRun]:
        """Run the piece on every call, twice on the first; none where its tensors have no values.

        Where PyTorch cannot run it (no f16 kernel on this machine), the recorded outputs are used.

        Args:
            module: the piece.
            calls: what it is run on.

        Raises:
            NonDeterministicError: the second run differs from the first.
        """
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.leaves(calls[0]).values())):
            return []
        try:
            return self._run_all(module, calls)
        except T2NError:
            raise
        except Exception as error:  # whatever the model's or PyTorch's code raises
            first = next(iter(str(error).splitlines()), type(error).__name__)
            self._notes.append(f"PyTorch cannot run it separately here: {redacted(first)}")
        recorded = [] if self._isolated else [PyTorchRun(call, call.outputs()) for call in calls]
        return [
            each for each in recorded if each.outputs and not any(tensor.is_meta for tensor in each.outputs.values())
        ]

    def _run_all(self, module: PieceModule, calls: Sequence[RecordedCall]) -> list[PyTorchRun]:
        found: list[PyTorchRun] = []
        for call in calls:
            try:
                module.feed.sizes(module.leaves(call))
            except CaptureError as error:
                self._notes.append(f"call {call.call.set_index} was skipped: {error.message}")
                continue
            found.append(PyTorchRun(call, module.answers(call)))
            if call is calls[0]:
                self._check_determinism(found[0].outputs, module.answers(call), call)
        return found

    def _check_determinism(
        self, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], call: RecordedCall
    ) -> None:
        for name, tensor in first.items():
            if not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(second[name])):
                raise NonDeterministicError(
                    f"{self._case.piece.class_name}: two runs on the same inputs differ in output {name!r}.",
                    "Random numbers cannot be exported: pass them as inputs, or switch them off.",
                )
        for name, held in call.results.items():
            before = held.tensor
            if before is None or before.is_meta or name not in first or before.shape != first[name].shape:
                continue
            if before.is_floating_point() and not torch.allclose(
                before.float(), first[name].float(), rtol=1e-2, atol=1e-2 * float(before.float().abs().max() or 1)
            ):
                self._notes.append(
                    f"run separately, output {name} differs from the recorded one: the module is in training "
                    "mode, or depends on something other than its arguments"
                )

    def examples(
        self, module: PieceModule, graph: TorchModuleIRGraph, references: Sequence[PyTorchRun]
    ) -> list[tuple[RecordedCall, ExampleRun]]:
        """Return the calls that have every input of the graph, as arrays.

        Args:
            module: the piece.
            graph: its captured graph.
            references: runs of it.
        """
        found = []
        for reference in references:
            inputs = module.feed.inputs(module.leaves(reference.call))
            missing = [variable.name for variable in graph.inputs if variable.name not in inputs]
            if missing:
                self._notes.append(f"call {reference.call.call.set_index} was skipped: it has no {missing[0]}")
                continue
            arrays = [as_array(inputs[variable.name]) for variable in graph.inputs]
            outputs = [as_array(as_stored(tensor)) for tensor in reference.outputs.values()]
            found.append((reference.call, ExampleRun(arrays, outputs, graph.output_names)))
        return found


def compare_with_reference(
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


__all__ = ["NonDeterministicError", "PyTorchRun", "PyTorchRuns", "compare_with_reference"]

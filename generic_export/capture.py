"""The first room: a module captured, the same way for an export, a diagnosis and a coverage report.

In: a module, example arguments, a target. Out: a graph, and with `prepare` everything that a translation of it needs.
What torch.export refuses is captured through its script or its trace, where there are values to compare a trace with.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

import generic_export.ops  # noqa: F401 - registers the translations, which decide what a capture keeps whole
from generic_export.errors import CaptureAttempt, CaptureError, NotCapturableError, OptionError, SpecializedAxisError
from generic_export.garbage_collection import collection_paused
from generic_export.torch_graph.capture.causes import ANY_LINE
from generic_export.torch_graph.capture.known_numbers import fold_numbers
from generic_export.torch_graph.capture.quantised_modules import spelled_out, without_zero_offsets
from generic_export.torch_graph.capture.replay import Stored
from generic_export.torch_graph.capture.tracer import TorchModuleTracer
from generic_export.torch_graph.fusion import STANDARD_FUSIONS, Fusion, apply_fusions
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.naming import identifier, name_results
from generic_export.torch_graph.precision.bfloat16 import without_bfloat16
from generic_export.torchscript.fallback import ITSELF, capture_fallbacks
from generic_export.torchscript.tracer import plain_modules
from generic_export.translate.modules import translated_modules
from generic_export.translate.registry import is_translated
from generic_export.weights.offload import OffloadedTensor, unread_parameters
from generic_export.weights.source import InMemoryTensor, SelfStored, TensorSource

if TYPE_CHECKING:  # the package of targets is above this room: its __init__ imports the tract target, which captures
    from generic_export.inference_target.base import InferenceTarget

logger = logging.getLogger("generic_export")

Read = TypeVar("Read")
Refusal = TypeVar("Refusal", bound=CaptureError)


class HeldGraph(nn.Module):
    """A module with a graph for its only part, and the graph's arguments."""

    PREFIX = "held."

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.held = graph

        @functools.wraps(graph.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return graph(*args, **kwargs)

        self.forward = forward


@dataclass(frozen=True)
class ModuleCall:
    """A module and how it is called and named while it is captured.

    Attributes:
        model: in eval mode; parameters may be on the meta device.
        args, kwargs: example arguments.
        input_names, output_names: see `export_model_to_nnef`.
        strip_prefix: leading path removed from module paths and parameter names (a wrapper's attribute).
        conditional: see `CaptureRequest`; who asks for it holds the archive to `conditions`, or tells.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    strip_prefix: str = ""
    conditional: bool = False

    def tracer(self, target: InferenceTarget) -> TorchModuleTracer:
        """Return what captures it for a target."""
        # A graph is run node by node by torch.export, past its forward, which is what takes nested arguments apart.
        held = HeldGraph(self.model) if isinstance(self.model, GraphModule) else None
        return TorchModuleTracer(
            module=self.model if held is None else held,
            args=self.args,
            kwargs=dict(self.kwargs),
            input_names=self.input_names,
            output_names=self.output_names,
            dynamic_axes=target.dynamic_axes,
            strip_prefix=self.strip_prefix if held is None else HeldGraph.PREFIX,
            keep=is_translated,
            whole=translated_modules(),
            conditional=self.conditional,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by the names that a captured graph has for them."""
        model = self.model
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        return {name.removeprefix(self.strip_prefix): tensor for name, tensor in named.items()}


def capture_with_fallback(
    call: ModuleCall, target: InferenceTarget, read: Callable[[TorchModuleTracer], Read], *, torchscript: bool = True
) -> tuple[Read, ModuleCall, str]:
    """Capture a module, or what may stand for it where torch.export refuses it.

    Args:
        call: the module.
        target: gives the dynamic axes, and may refuse the module.
        read: runs a tracer and makes of it what is wanted.
        torchscript: go on to the module's script, then its trace.

    Returns:
        What `read` made, what it was made of, and a sentence about the detour ("" for none).

    Raises:
        NotCapturableError: nothing can be captured; it is the first refusal.
        SpecializedAxisError: a trace can, but freezes a dynamic axis.
        T2NError: what `read` raises beside that.
    """
    target.pre_trace(call.model, call.input_names, call.output_names)
    try:
        with unread_parameters(call.model):
            return read(call.tracer(target)), call, ""
    except NotCapturableError as error:
        if not torchscript:
            raise
        return _captured_otherwise(call, target, read, error)


def _captured_otherwise(
    refused: ModuleCall, target: InferenceTarget, read: Callable[[TorchModuleTracer], Read], error: NotCapturableError
) -> tuple[Read, ModuleCall, str]:
    attempts = [*error.attempts] or [CaptureAttempt("torch.export", error.message)]
    found = capture_fallbacks(
        refused.model, refused.args, refused.kwargs, target.dynamic_axes, refused.input_names, attempts.append
    )
    try:
        for fallback in found:
            inputs, outputs = refused.input_names or fallback.input_names, refused.output_names or fallback.output_names
            prefix, conditional = refused.strip_prefix, refused.conditional
            other = ModuleCall(fallback.module, fallback.args, fallback.kwargs, inputs, outputs, prefix, conditional)
            try:
                with unread_parameters(other.model), fallback.during():
                    result = read(other.tracer(target))
            except CaptureError as refusal:
                attempts.append(CaptureAttempt(fallback.how, refusal.message))
                continue
            return result, other, f"{error.message} It was captured with {fallback.how}. {fallback.caution}".strip()
    except SpecializedAxisError as frozen:
        if frozen.message != attempts[-1].met:
            attempts.append(CaptureAttempt("torch.export with numbers from the example", frozen.message))
        raise _with_attempts(SpecializedAxisError(error.message, f"{error.hint} {frozen.hint}"), attempts) from error
    if attempts[-1].method == ITSELF and error.hint == ANY_LINE:
        failed = f"{class_name(refused.model)}: the module fails in PyTorch on the example inputs: {attempts[-1].met}."
        raise _with_attempts(
            NotCapturableError(failed, "Use arguments with which `model(*args, **kwargs)` runs."), attempts
        ) from error
    raise _with_attempts(error, attempts)


def _with_attempts(error: Refusal, attempts: Sequence[CaptureAttempt]) -> Refusal:
    """Return a refusal with the record of what was tried; the fallbacks' failures are in it, and not in the message."""
    for attempt in attempts[1:]:
        logger.info("%s", attempt)
    error.attempts = tuple(attempts)
    return error


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    target: InferenceTarget,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    fusions: Sequence[Fusion] = (),
    strip_prefix: str = "",
    torchscript: bool = True,
) -> TorchModuleIRGraph:
    """Capture a module, recognise what the engine has operators for, and name the results.

    Args:
        model, args, input_names, output_names, kwargs, strip_prefix: see `ModuleCall`.
        target: gives the dynamic axes and its own rewrites.
        fusions: recognisers beside the standard ones.
        torchscript: see `capture_with_fallback`.

    Raises:
        CaptureError: see `capture_with_fallback`.
    """
    call = ModuleCall(model, args, dict(kwargs or {}), input_names, output_names, strip_prefix)
    return _graph(call, target, fusions, torchscript=torchscript)[0]


def _graph(
    call: ModuleCall, target: InferenceTarget, fusions: Sequence[Fusion], *, torchscript: bool
) -> tuple[TorchModuleIRGraph, ModuleCall, str]:
    def read(tracer: TorchModuleTracer) -> TorchModuleIRGraph:
        graph = apply_fusions(without_bfloat16(tracer.trace()), (fold_numbers, *STANDARD_FUSIONS, *fusions))
        return name_results(target.post_capture(graph))

    with collection_paused():
        found = capture_with_fallback(call, target, read, torchscript=torchscript)
    if found[2]:
        warnings.warn(found[2], stacklevel=6)
    return found


@dataclass(frozen=True)
class Prepared:
    """A module captured with everything that a translation, or a search for a fault in one, needs.

    Attributes:
        model: the module.
        args, kwargs: what it was captured with.
        graph: what was captured.
        tensors: the parameters and buffers by the names that the graph has for them; on the meta device if the module is.
        detour: how it was captured when torch.export refused it, as a sentence, or "".
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: TorchModuleIRGraph
    tensors: Mapping[str, torch.Tensor]
    detour: str = ""

    @property
    def sources(self) -> dict[str, TensorSource]:
        """A source per parameter, buffer and constant that the graph reads."""
        sources = {
            variable.name: _source_of(variable.name, self.tensors[variable.name]) for variable in self.graph.parameters
        }
        return sources | {name: InMemoryTensor(name, as_stored(value)) for name, value in self.graph.constants.items()}

    @property
    def stored(self) -> Stored:
        """Those tensors as PyTorch computes with them, by name."""
        return {**self.tensors, **self.graph.constants}.get


def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    target: InferenceTarget,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    allow_same_io_names: bool = False,
    auto_harden_jit: bool = True,
    fusions: Sequence[Fusion] = (),
    strip_prefix: str = "",
    torchscript: bool = True,
) -> Prepared:
    """Capture a module as `export_model_to_nnef` does; see there for the arguments and what is raised.

    ScriptModules are interpreted; `fusions` are recognisers beside the standard ones, `strip_prefix` and `torchscript` as in
    `ModuleCall` and `capture_with_fallback`.
    """
    keywords = dict(kwargs or {})
    with prepared_module(model, args, keywords, target, auto_harden_jit=auto_harden_jit) as plain:
        call = ModuleCall(plain, args, keywords, input_names, output_names, strip_prefix, conditional=True)
        graph, taken, detour = _graph(call, target, fusions, torchscript=torchscript)
        graph = _with_distinct_names(graph, allow_same=allow_same_io_names)
        found = Prepared(plain, args, keywords, graph, taken.tensors(), detour)
        return replace(found, graph=without_zero_offsets(graph, found.stored))


@contextmanager
def prepared_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: InferenceTarget,
    *,
    auto_harden_jit: bool,
) -> Iterator[nn.Module]:
    """Yield what is captured in a module's place: its ScriptModules interpreted, its quantised modules spelled out."""
    keep_sizes = bool(target.dynamic_axes)
    with plain_modules(model, args, kwargs, harden=auto_harden_jit, keep_sizes=keep_sizes) as plain, spelled_out(plain):
        yield plain


def class_name(model: nn.Module) -> str:
    """Return the name of a module's class; a ScriptModule's is that of the class it was made from."""
    return str(getattr(model, "original_name", "") or type(model).__name__)


def _source_of(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return where a tensor's bytes come from; one that lives on disk, or in blocks, is streamed as it lies there."""
    if isinstance(tensor, SelfStored) and not tensor.dtype.is_complex:
        return tensor.stored_source(name)
    plain = tensor.load() if isinstance(tensor, OffloadedTensor) else tensor
    return InMemoryTensor(name, as_stored(plain))


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the archive holds it: complex numbers as pairs (ops/complex_layout.py)."""
    plain = tensor.detach().cpu()
    return torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain


def _with_distinct_names(graph: TorchModuleIRGraph, *, allow_same: bool) -> TorchModuleIRGraph:
    """Return the graph with a distinct identifier for every input and output.

    Raises:
        OptionError: two of them would be written alike.
    """
    taken: set[str] = set()
    for variable in graph.inputs:
        _take(taken, variable.name)
    names = []
    for name in graph.output_names:
        clashes = identifier(name) in {identifier(variable.name) for variable in graph.inputs}
        names.append(f"{name}_output" if allow_same and clashes else name)
        _take(taken, names[-1])
    return replace(graph, output_names=tuple(names))


def _take(taken: set[str], name: str) -> None:
    if identifier(name) in taken:
        raise OptionError(
            f"two inputs or outputs have the name {identifier(name)!r} in the graph.",
            "Use different names (an output may have the name of an input with allow_same_io_names=True).",
        )
    taken.add(identifier(name))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode for a block, and back in its own mode after it."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, not an nn.Module.")
    # A frozen script has no mode: it is what it was frozen as.
    modes = {module: module.training for module in model.modules() if hasattr(module, "training")}
    try:
        if hasattr(model, "training"):
            _evaluate(model, modes)
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _evaluate(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    # What torch.export made, PT2E's models among it, was exported in a mode and refuses to be asked for another.
    try:
        model.eval()
    except NotImplementedError:
        for module in modules:
            module.training = False


__all__ = [
    "ModuleCall",
    "Prepared",
    "as_stored",
    "capture",
    "capture_with_fallback",
    "class_name",
    "evaluation_mode",
    "prepare",
    "prepared_module",
]

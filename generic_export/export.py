"""`export_model_to_nnef`: any `nn.Module` to a checked NNEF archive, the five rooms in order."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import generic_export.ops  # noqa: F401 - registers every translation
from generic_export.errors import (
    CaptureError,
    EngineError,
    EngineMissingError,
    GraphError,
    MismatchError,
    NotCapturableError,
    OptionError,
    T2NError,
)
from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.example import ExampleRun, call_example
from generic_export.inference_target.tract.evidence.bisect import Translation
from generic_export.inference_target.tract.evidence.debug_bundle import BundleOptions, FailingCase, write_debug_bundle
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.logs import logging_at
from generic_export.nnef.block_storage import storage_uses, store_in_blocks
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.order import group_by_module
from generic_export.nnef.registries import with_fragments
from generic_export.torch_graph.fusion import STANDARD_FUSIONS, Fusion, apply_fusions
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.known_numbers import fold_numbers
from generic_export.torch_graph.naming import identifier, name_results
from generic_export.torch_graph.nested import named_outputs
from generic_export.torch_graph.quantised_modules import spelled_out, without_zero_offsets
from generic_export.torch_graph.replay import Stored
from generic_export.torch_graph.tracer import TorchModuleTracer, torch_version
from generic_export.torchscript.fallback import stands
from generic_export.torchscript.tracer import plain_modules
from generic_export.translate.modules import translated_modules
from generic_export.translate.registry import is_translated
from generic_export.translate.translate import TranslationOptions, translate
from generic_export.weights.offload import OffloadedTensor, unread_parameters
from generic_export.weights.part import part_source
from generic_export.weights.source import BlockTensorSource, InMemoryTensor, SelfStored, TensorSource
from generic_export.write.document import write_document

PRODUCER = "t2n-llm"

logger = logging.getLogger("generic_export")


def export_model_to_nnef(
    model: nn.Module,
    args: torch.Tensor | tuple[Any, ...],
    file_path_export: str | os.PathLike[str],
    inference_target: InferenceTarget,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    compression_level: int | None = 0,
    nnef_variable_naming_scheme: str = "natural_verbose",
    custom_extensions: Sequence[str] = (),
    overwrite: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    check_io_names_qte_match: bool = True,
    allow_same_io_names: bool = False,
    log_level: int | str | None = None,
    debug_bundle_path: str | os.PathLike[str] | None = None,
    auto_harden_jit: bool = True,
) -> Path:
    """Export a module to an NNEF archive and prove it in the target's engine.

    Args:
        model: the module; it is captured in eval mode and handed back as it was.
        args: example inputs of the forward (a lone tensor stands for a tuple of one); dicts, dataclasses, tuples and lists
            of tensors become one input per tensor.
        file_path_export: where to write; the suffix follows `compression_level`, see `nnef.archive`.
        inference_target: `TractNNEF` or `KhronosNNEF`; carries the dynamic axes and the check.
        input_names: a name per input tensor; None takes the forward's parameter names (`batch.ids.0` for nested ones).
        output_names: a name per output tensor; None gives `output`, or `output_0`, `output_1`, ..., or the names that a
            dict or dataclass has for them.
        compression_level: None for a directory, 0 for `.tar`, 1-9 for `.tgz`.
        nnef_variable_naming_scheme: `natural_verbose`, `natural_verbose_camel`, `raw` or `numeric`.
        custom_extensions: relations between sizes that tract may rely on, such as `S >= 1`.
        overwrite: replace an archive that is there already.
        kwargs: keyword arguments of the forward.
        check_io_names_qte_match: refuse names that are not as many as the tensors; False ignores surplus names and gives
            tensors without a name their own.
        allow_same_io_names: let an output bear the name of an input; it is written as `<name>_output` then.
        log_level: level of the `generic_export` logger during the call, such as "INFO"; None leaves it as it is.
        debug_bundle_path: `.tgz` that is written when the check fails: the case in one file, see `assert_io_and_debug_bundle`.
        auto_harden_jit: specialise ScriptModules (`model`, or modules in it) for the example inputs, on a copy, see
            `harden_jit_for_export`; nothing is decided by a size when axes are dynamic. False keeps every decision.

    Returns:
        The path of the archive.

    Raises:
        OptionError: names or dynamic axes do not fit the module.
        CaptureError: PyTorch cannot capture the module, or a dynamic axis is frozen by it.
        TranslationError: an operator has no NNEF form.
        ArchiveError: the archive cannot be written.
        EngineError: the engine refuses or cannot run the archive.
        MismatchError: the engine's outputs differ from PyTorch's.
    """
    if debug_bundle_path is not None and not (isinstance(inference_target, TractNNEF) and inference_target.check_io):
        raise OptionError("debug_bundle_path needs a check that can fail.", "Use TractNNEF with check_io=True.")
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = dict(kwargs or {})
    with logging_at(log_level, logger.name), evaluation_mode(model):
        if not check_io_names_qte_match:
            call, result = call_example(model, arguments, keywords)
            input_names = _completed(input_names, call.names)
            output_names = _completed(output_names, named_outputs(result)[0])
        prepared = prepare(
            model,
            arguments,
            inference_target,
            input_names,
            output_names,
            kwargs=keywords,
            allow_same_io_names=allow_same_io_names,
            auto_harden_jit=auto_harden_jit,
        )
        graph, kind = prepared.graph, class_name(model)
        logger.info("captured %s: %d operators", kind, len(graph.ops))
        example = _example_run(model, arguments, keywords, graph) if inference_target.check_io else None
        document = translate_graph(
            graph,
            inference_target,
            TranslationOptions(
                naming_scheme=nnef_variable_naming_scheme,
                assertions=tuple(custom_extensions),
                properties=tuple(producer_properties(source_model=kind).items()),
            ),
        )
        logger.info("translated: %d operations, %d tensors", len(document.operations), len(document.variables))
        document, stored = _in_blocks(document, with_parts(document, prepared.sources))
        archive = write_document(
            Path(file_path_export), document, stored, compression_level=compression_level, overwrite=overwrite
        ).path
        logger.info("wrote %s", archive)
        if example is not None:
            with _bundled_failure(debug_bundle_path, archive, example, prepared, document, inference_target):
                inference_target.post_export(archive, example)
            logger.info("checked %s in the engine", archive)
    return archive


@dataclass(frozen=True)
class Prepared:
    """A module captured with everything that a translation, or a search for a fault in one, needs.

    Attributes:
        model: the module.
        args, kwargs: what it was captured with.
        graph: what was captured.
        sources: a source per stored tensor that the graph reads.
        stored: those tensors as PyTorch computes with them, by name.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: TorchModuleIRGraph
    sources: Mapping[str, TensorSource]
    stored: Stored


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
) -> Prepared:
    """Capture a module as `export_model_to_nnef` does; see there for the arguments and what is raised.

    ScriptModules are interpreted; what torch.export cannot capture is captured through its script or its trace.
    """
    keywords = dict(kwargs or {})
    keep_sizes = bool(target.dynamic_axes)
    scripts = plain_modules(model, args, keywords, harden=auto_harden_jit, keep_sizes=keep_sizes)
    with scripts as plain, spelled_out(plain):
        captured = _Captured(plain, args, keywords, input_names, output_names)
        try:
            graph = captured.graph(target)
        except NotCapturableError as error:
            captured, graph = _captured_otherwise(captured, target, error)
        stored = _stored_in(captured.model, graph)
        graph = without_zero_offsets(_with_distinct_names(graph, allow_same=allow_same_io_names), stored)
        return Prepared(plain, args, keywords, graph, module_sources(captured.model, graph), stored)


@dataclass(frozen=True)
class _Captured:
    """A module and how it is called and named while it is captured."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None

    def graph(self, target: InferenceTarget) -> TorchModuleIRGraph:
        with unread_parameters(self.model):
            return capture(self.model, self.args, target, self.input_names, self.output_names, kwargs=self.kwargs)


def _captured_otherwise(
    refused: _Captured, target: InferenceTarget, error: NotCapturableError
) -> tuple[_Captured, TorchModuleIRGraph]:
    """Capture the script or the trace of a module that torch.export refused, and tell the user.

    Raises:
        NotCapturableError: neither can be captured either; it is the first refusal.
        SpecializedAxisError: a trace can, but freezes a dynamic axis.
    """
    axes = target.dynamic_axes
    for stand in stands(refused.model, refused.args, refused.kwargs, axes, refused.input_names):
        inputs, outputs = refused.input_names or stand.input_names, refused.output_names or stand.output_names
        captured = _Captured(stand.module, stand.args, {}, inputs, outputs)
        try:
            graph = captured.graph(target)
        except CaptureError as other:
            logger.info("%s: %s does not help: %s", class_name(refused.model), stand.how, other.message)
            continue
        warnings.warn(f"{error.message} It was captured through {stand.how}. {stand.caution}".strip(), stacklevel=4)
        return captured, graph
    raise error


def class_name(model: nn.Module) -> str:
    """Return the name of a module's class; a ScriptModule's is that of the class it was made from."""
    return str(getattr(model, "original_name", "") or type(model).__name__)


@contextmanager
def _bundled_failure(
    path: str | os.PathLike[str] | None,
    archive: Path,
    example: ExampleRun,
    prepared: Prepared,
    document: NnefGraph,
    target: InferenceTarget,
) -> Iterator[None]:
    """Write a debug bundle when the check in the block fails, and say where it is."""
    try:
        yield
    except EngineMissingError:
        raise
    except (MismatchError, EngineError) as error:
        if path is None or not isinstance(target, TractNNEF):
            raise
        bundle = write_failing_case(Path(path), archive, example, prepared, document, target, error)
        hint = f"{error.hint or ''} The case is in {bundle}.".strip()
        raise type(error)(error.message, hint) from error


def write_failing_case(
    path: Path,
    archive: Path,
    example: ExampleRun,
    prepared: Prepared,
    document: NnefGraph,
    target: TractNNEF,
    error: T2NError,
    options: BundleOptions | None = None,
) -> Path:
    """Write the debug bundle of a check that failed; see `write_debug_bundle`."""
    translation = Translation(prepared.graph, document, prepared.stored)
    case = FailingCase(archive, error, example, translation, target, prepared.model, prepared.args, prepared.kwargs)
    return write_debug_bundle(path, case, options)


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
) -> TorchModuleIRGraph:
    """Capture a module, recognise what the engine has operators for, and name the results.

    Args:
        model: the module, in eval mode; parameters may be on the meta device.
        args: example arguments.
        target: gives the dynamic axes and its own rewrites.
        input_names, output_names, kwargs: see `export_model_to_nnef`.
        fusions: recognisers beside the standard ones.
        strip_prefix: leading path removed from module paths and parameter names.
    """
    target.pre_trace(model)
    tracer = TorchModuleTracer(
        module=model,
        args=args,
        kwargs=dict(kwargs or {}),
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=target.dynamic_axes,
        strip_prefix=strip_prefix,
        keep=is_translated,
        whole=translated_modules(),
    )
    graph = apply_fusions(tracer.trace(), (fold_numbers, *STANDARD_FUSIONS, *fusions))
    return name_results(target.post_trace(graph))


def translate_graph(graph: TorchModuleIRGraph, target: InferenceTarget, options: TranslationOptions) -> NnefGraph:
    """Translate a captured graph for a target: its numerics and properties are added to the options."""
    complete = TranslationOptions(
        graph_name=options.graph_name,
        numerics=target.numerics,
        spelling=target.spelling,
        naming_scheme=options.naming_scheme,
        assertions=options.assertions,
        properties=(*options.properties, *target.properties.items()),
    )
    document = target.post_translate(group_by_module(translate(graph, complete)))
    return with_fragments(document, target.specific_fragments(document))


def producer_properties(source_model: str) -> dict[str, str | float]:
    """Return the properties that say who made a document, with which versions, from what."""
    return {
        "producer": PRODUCER,
        "producer_version": producer_version(),
        "torch_version": torch_version(),
        "source_model": source_model,
    }


def producer_version() -> str:
    """Return the version of this project, or "0" when it runs from a bare source tree."""
    try:
        return version("t2n-llm")
    except PackageNotFoundError:
        return "0"


def module_sources(model: nn.Module, graph: TorchModuleIRGraph) -> dict[str, TensorSource]:
    """Return a source per parameter, buffer and constant that a captured graph reads, from the module itself."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    sources: dict[str, TensorSource] = {}
    for variable in graph.parameters:
        sources[variable.name] = _source_of(variable.name, tensors[variable.name])
    for name, value in graph.constants.items():
        sources[name] = InMemoryTensor(name, _stored(value))
    return sources


def _stored_in(model: nn.Module, graph: TorchModuleIRGraph) -> Callable[[str], torch.Tensor | None]:
    """Return a look-up of the tensors that a captured graph reads, by name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return (tensors | dict(graph.constants)).get


def _source_of(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return where a tensor's bytes come from; one that lives on disk, or in blocks, is streamed as it lies there."""
    if isinstance(tensor, SelfStored) and not tensor.dtype.is_complex:
        return tensor.stored_source(name)
    plain = tensor.load() if isinstance(tensor, OffloadedTensor) else tensor
    return InMemoryTensor(name, _stored(plain))


def with_parts(document: NnefGraph, sources: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """Return the sources, those of stored tensors that are parts of a parameter included."""
    parts = {variable.label: variable.part for variable in document.variables if variable.part is not None}
    return {**sources, **{label: part_source(label, part, sources[part.parameter]) for label, part in parts.items()}}


def _in_blocks(
    document: NnefGraph, sources: Mapping[str, TensorSource]
) -> tuple[NnefGraph, Mapping[str, TensorSource]]:
    """Return the document that reads from blocks the tensors whose sources are blocks.

    Raises:
        GraphError: an operation cannot read such a tensor.
    """
    formats = {
        variable.label: source.block_format
        for variable in document.variables
        if isinstance(source := sources[variable.label], BlockTensorSource)
    }
    turned = {label for label, use in storage_uses(document).items() if label in formats and use.axes is not None}
    for label in turned:
        raise GraphError(
            f"tensor {label!r}: its blocks do not lie along the axis that the model sums over.",
            "Store the transposed weight, as nn.Linear has it, or leave this tensor plain.",
        )
    return (store_in_blocks(document, formats) if formats else document), sources


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the archive holds it: complex numbers as pairs (ops/complex_layout.py)."""
    plain = tensor.detach().cpu()
    return torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain


def _example_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: TorchModuleIRGraph
) -> ExampleRun:
    call, result = call_example(model, args, kwargs)
    _, outputs = named_outputs(result)
    if len(outputs) != len(graph.outputs):
        raise CaptureError(f"{type(model).__name__} returned {len(outputs)} tensors, its graph {len(graph.outputs)}.")
    return ExampleRun.from_tensors(call.tensors, outputs, graph.output_names)


def _completed(given: Sequence[str] | None, own: Sequence[str]) -> Sequence[str] | None:
    """Return as many names as there are tensors: those given, then the tensors' own."""
    return given if given is None else (*given[: len(own)], *own[len(given) :])


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
            f"two inputs or outputs are written {identifier(name)!r} in the graph.",
            "Give each its own name (an output may bear an input's with allow_same_io_names=True).",
        )
    taken.add(identifier(name))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode for a block, and back in its own mode after it."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, not an nn.Module.")
    # A frozen script has no mode: it is what it was frozen as.
    modes = {module: module.training for module in model.modules() if hasattr(module, "training")}
    if hasattr(model, "training"):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training

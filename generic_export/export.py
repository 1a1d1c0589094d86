"""`export_model_to_nnef`: any `nn.Module` to a checked NNEF archive, the five rooms in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from generic_export.errors import CaptureError, OptionError
from generic_export.inference_target.base import ExampleRun, InferenceTarget
from generic_export.nnef.document import write_document
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.layout import group_by_module
from generic_export.ops.registry import is_translated
from generic_export.ops.translate import TranslationOptions, translate
from generic_export.torch_graph.fusion import STANDARD_FUSIONS, Fusion, apply_fusions
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.naming import name_results
from generic_export.torch_graph.tracer import TorchModuleTracer, torch_version
from generic_export.weights.source import InMemoryTensor, TensorSource

PRODUCER = "t2n-llm"


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
) -> Path:
    """Export a module to an NNEF archive and prove it in the target's engine.

    Args:
        model: the module; it is captured in eval mode and handed back as it was.
        args: example inputs of the forward (a lone tensor stands for a tuple of one).
        file_path_export: where to write; the suffix follows `compression_level`, see `nnef.archive`.
        inference_target: `TractNNEF` or `KhronosNNEF`; carries the dynamic axes and the check.
        input_names: a name per input tensor; None takes the forward's parameter names.
        output_names: a name per output tensor; None gives `output`, or `output_0`, `output_1`, ...
        compression_level: None for a directory, 0 for `.tar`, 1-9 for `.tgz`.
        nnef_variable_naming_scheme: `natural_verbose`, `natural_verbose_camel`, `raw` or `numeric`.
        custom_extensions: relations between sizes that tract may rely on, such as `S >= 1`.
        overwrite: replace an archive that is there already.

    Returns:
        The path of the archive.

    Raises:
        CaptureError: PyTorch cannot capture the module, or a dynamic axis is frozen by it.
        TranslationError: an operator has no NNEF form.
        ArchiveError: the archive cannot be written.
        MismatchError: the engine's outputs differ from PyTorch's.
    """
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    with _evaluation_mode(model):
        graph = capture(model, arguments, inference_target, input_names, output_names)
        example = _example_run(model, arguments, graph) if inference_target.check_io else None
    document = translate_graph(
        graph,
        inference_target,
        TranslationOptions(
            naming_scheme=nnef_variable_naming_scheme,
            assertions=tuple(custom_extensions),
            properties=tuple(producer_properties(source_model=type(model).__name__).items()),
        ),
    )
    sources = module_sources(model, graph)
    archive = write_document(
        Path(file_path_export), document, sources, compression_level=compression_level, overwrite=overwrite
    )
    if example is not None:
        inference_target.post_export(archive, example)
    return archive


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    target: InferenceTarget,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    fusions: Sequence[Fusion] = (),
    strip_prefix: str = "",
) -> TorchModuleIRGraph:
    """Capture a module, recognise what the engine has operators for, and name the results.

    Args:
        model: the module, in eval mode; parameters may be on the meta device.
        args: example arguments.
        target: gives the dynamic axes and its own rewrites.
        input_names, output_names: see `export_model_to_nnef`.
        fusions: recognisers beside the standard ones.
        strip_prefix: leading path removed from module paths and parameter names.
    """
    tracer = TorchModuleTracer(
        module=model,
        args=args,
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=target.dynamic_axes,
        strip_prefix=strip_prefix,
        keep=is_translated,
    )
    graph = apply_fusions(tracer.trace(), (*STANDARD_FUSIONS, *fusions))
    return name_results(target.post_trace(graph))


def translate_graph(graph: TorchModuleIRGraph, target: InferenceTarget, options: TranslationOptions) -> NnefGraph:
    """Translate a captured graph for a target: its numerics and properties are added to the options."""
    complete = TranslationOptions(
        graph_name=options.graph_name,
        numerics=target.numerics,
        naming_scheme=options.naming_scheme,
        assertions=options.assertions,
        properties=(*options.properties, *target.properties.items()),
    )
    return target.post_translate(group_by_module(translate(graph, complete)))


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
        sources[variable.name] = InMemoryTensor(variable.name, tensors[variable.name].detach().cpu())
    for name, value in graph.constants.items():
        sources[name] = InMemoryTensor(name, value.detach().cpu())
    return sources


def _example_run(model: nn.Module, args: tuple[Any, ...], graph: TorchModuleIRGraph) -> ExampleRun:
    copies = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, args)
    inputs = [leaf for leaf in pytree.tree_leaves(copies) if isinstance(leaf, torch.Tensor)]
    with torch.no_grad():
        result = model(*copies)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if len(outputs) != len(graph.outputs):
        raise CaptureError(f"{type(model).__name__} returned {len(outputs)} tensors, its graph {len(graph.outputs)}.")
    return ExampleRun.from_tensors(inputs, outputs, graph.output_names)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode for a block, and back in its own mode after it."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}, not an nn.Module.")
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training

"""`export_model_to_nnef`: any `nn.Module` to a checked NNEF archive, the five rooms in order."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.assertions import Assertion, enforced, held, parse_extensions
from generic_export.capture import Prepared, class_name, evaluation_mode, prepare
from generic_export.documents import module_classes, producer_properties, translate_graph, with_tensors
from generic_export.errors import CaptureError, DimensionError, GraphError, OptionError, SpecializedAxisError, T2NError
from generic_export.half_weights import half_parameters, half_sources, rounded_to_half, stored_in_half
from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.example import ExampleCall, ExampleRun, call_example
from generic_export.inference_target.tract.evidence.debug_bundle import bundled_failure, write_failing_case
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.logs import logging_at
from generic_export.nnef.composition import Composition, compose
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import store_in_half
from generic_export.tested_versions import TORCH, TRACT, doubts
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.multiples import declared_too
from generic_export.torch_graph.naming import DEFAULT_VARNAME_SCHEME, VariableNamingScheme
from generic_export.translate.translate import TranslationOptions
from generic_export.write.document import write_document
from generic_export.write.journal import delete
from generic_export.write.output_path import archive_format_of, check_target, failed_path, level_for, put_in_place

logger = logging.getLogger("generic_export")


def export_model_to_nnef(
    model: nn.Module,
    args: torch.Tensor | tuple[Any, ...],
    file_path_export: str | os.PathLike[str],
    inference_target: InferenceTarget,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    compression_level: int | None = 0,
    log_level: int | str | None = logging.INFO,
    nnef_variable_naming_scheme: VariableNamingScheme | str = DEFAULT_VARNAME_SCHEME,
    check_io_names_qte_match: bool = True,
    debug_bundle_path: str | os.PathLike[str] | None = None,
    custom_extensions: Sequence[str] | str | None = None,
    allow_same_io_names: bool = False,
    auto_harden_jit: bool = True,
    *,
    overwrite: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    fragments: bool = False,
    half: bool = False,
) -> Path:
    """Export a module to an NNEF archive and prove it in the target's engine.

    Args:
        model: the module; it is captured in eval mode and handed back as it was.
        args: example inputs of the forward (a lone tensor stands for a tuple of one); dicts, dataclasses, tuples and lists
            of tensors become one input per tensor.
        file_path_export: where to write. A suffix `.tar`, `.tgz` or `.tar.gz` says in which form; any other name gets the
            suffix of `compression_level`.
        inference_target: `TractNNEF` or `KhronosNNEF`; carries the dynamic axes and the check.
        input_names: a name per input tensor; None takes the forward's parameter names (`batch.ids.0` for nested ones).
        output_names: a name per output tensor; None gives `output`, or `output_0`, `output_1`, ..., or the names that a
            dict or dataclass has for them.
        compression_level: None for a directory, 0 for `.tar`, 1-9 for `.tgz`; with the suffix `.tgz`, 0 leaves the level open.
        log_level: level of the `generic_export` logger during the call; None leaves it as it is.
        nnef_variable_naming_scheme: a `VariableNamingScheme`, or its text: `natural_verbose`, `natural_verbose_camel`, `raw`
            or `numeric`.
        check_io_names_qte_match: refuse names that are not as many as the tensors; False ignores surplus names and gives
            tensors without a name their own.
        debug_bundle_path: `.tgz` that is written when the check fails: the case in one file, see `assert_io_and_debug_bundle`.
        custom_extensions: relations between sizes that tract may rely on, such as `S >= 1` or a whole line
            `extension tract_assert S >= 1`; they must hold at the example.
        allow_same_io_names: let an output bear the name of an input; it is written as `<name>_output` then.
        auto_harden_jit: specialise ScriptModules (`model`, or modules in it) for the example inputs, on a copy, see
            `harden_jit_for_export`; nothing is decided by a size when axes are dynamic. False keeps every decision.
        overwrite: replace an archive that is there already; an export that fails leaves it as it is.
        kwargs: keyword arguments of the forward.
        fragments: write modules of a list that do the same (layers of a stack) as calls of one fragment.
        half: store f32 parameters of rank 2 and more in f16, and compute in f32 (the engine multiplies f16 weights with f32 values
            as they are); the check compares with the module whose parameters are rounded alike. A parameter that f16 does
            not hold stays in f32.

    Returns:
        The path of the archive.

    Raises:
        OptionError: names, dynamic axes or extensions do not fit the module.
        CaptureError: PyTorch cannot capture the module, or a dynamic axis is frozen by it.
        TranslationError: an operator has no NNEF form.
        ArchiveError: the archive cannot be written.
        EngineError: the engine refuses or cannot run the archive, which is kept as `<name>.failed.<suffix>`.
        MismatchError: the engine's outputs differ from PyTorch's; the archive is kept likewise.
    """
    for doubt in doubts(TORCH, TRACT):
        warnings.warn(doubt, stacklevel=2)
    assertions = parse_extensions(custom_extensions)
    level = level_for(file_path_export, compression_level)
    target_path, _ = archive_format_of(file_path_export, level)
    check_target(target_path, overwrite)
    if debug_bundle_path is not None and not (isinstance(inference_target, TractNNEF) and inference_target.check_io):
        raise OptionError("debug_bundle_path needs a check that can fail.", "Use TractNNEF with check_io=True.")
    if fragments and not isinstance(inference_target, TractNNEF):
        raise OptionError(
            "fragments for modules are written for tract alone.", "Leave fragments out, or use TractNNEF."
        )
    if half and not isinstance(inference_target, TractNNEF):
        raise OptionError("half mixes element types, which tract alone reads.", "Leave half out, or use TractNNEF.")
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = dict(kwargs or {})
    with logging_at(log_level, logger.name), evaluation_mode(model):
        if not check_io_names_qte_match:
            answered = call_example(model, arguments, keywords)
            input_names = _completed(input_names, answered.call.names)
            output_names = _completed(output_names, answered.output_names)

        def translated(target: InferenceTarget) -> tuple[Prepared, NnefGraph]:
            prepared = prepare(
                model,
                arguments,
                target,
                input_names,
                output_names,
                kwargs=keywords,
                allow_same_io_names=allow_same_io_names,
                auto_harden_jit=auto_harden_jit,
            )
            return prepared, _document(
                prepared, class_name(model), model, target, assertions, nnef_variable_naming_scheme
            )

        prepared, document, inference_target = _as_declared(translated, inference_target, class_name(model))
        _tell_conditions(class_name(model), prepared.graph, refused=inference_target.refuses_sizes)
        document = store_in_half(document, half_parameters(model)) if half else document
        with ExitStack() as stack:
            checked = inference_target.check_io
            if half and checked:  # what is compared, here and in a search for a fault, has the archive's numbers
                stack.enter_context(rounded_to_half(model, stored_in_half(document)))
            example = _example_run(model, arguments, keywords, prepared.graph) if checked else None
            document, stored = with_tensors(document, prepared.sources)
            stored = half_sources(document, stored) if half else stored
            forms = compose(document, module_classes(model)) if fragments else Composition(document, document)
            archive = stack.enter_context(_proven(target_path)) if checked else target_path
            write_document(archive, forms.composed, stored, compression_level=level, overwrite=overwrite or checked)
            logger.info("wrote %s", archive)
            write = None
            if example is not None and debug_bundle_path is not None and isinstance(inference_target, TractNNEF):
                bundle = Path(debug_bundle_path)
                write = partial(write_failing_case, bundle, archive, example, prepared, forms.flat, inference_target)
            bundle_path = None if debug_bundle_path is None else Path(debug_bundle_path)
            stack.enter_context(bundled_failure(write))
            asked = ExampleCall(arguments, keywords, example)
            inference_target.post_export(model, forms.composed, asked, archive, bundle_path)
        if example is not None:
            logger.info("checked %s in the engine", target_path)
    return target_path


def _document(
    prepared: Prepared,
    kind: str,
    model: nn.Module,
    target: InferenceTarget,
    assertions: Sequence[Assertion],
    naming_scheme: VariableNamingScheme | str,
) -> NnefGraph:
    """Translate what was captured.

    Raises:
        T2NError: as `translate_graph`; it knows what PyTorch assumed of sizes.
    """
    graph = prepared.graph
    logger.info("captured %s: %d operators", kind, len(graph.ops))
    relations = held(assertions, prepared)
    if target.refuses_sizes:
        relations += enforced(assertions, graph)
    properties = tuple(producer_properties(source_model=kind).items())
    options = TranslationOptions(naming_scheme=naming_scheme, assertions=relations, properties=properties)
    try:
        document = translate_graph(graph, target, options, model)
    except T2NError as error:
        error.declarations = graph.declarations
        raise
    logger.info("translated: %d operations, %d tensors", len(document.operations), len(document.variables))
    return document


def _as_declared(
    translated: Callable[[InferenceTarget], tuple[Prepared, NnefGraph]], target: InferenceTarget, kind: str
) -> tuple[Prepared, NnefGraph, InferenceTarget]:
    """Return what is made for a target; where that is refused, for sizes as the module would have them declared.

    Raises:
        T2NError: the first refusal.
    """
    try:
        return *translated(target), target
    except (CaptureError, DimensionError, GraphError) as error:
        refusal = error
    # Where a trace was tried after torch.export, its own refusal is the cause of this one.
    sizes = refusal.declarations or getattr(refusal.__cause__, "declarations", ())
    if not sizes or not target.refuses_sizes:
        raise refusal
    other = target.with_dynamic_axes(declared_too(target.dynamic_axes, sizes))
    try:
        found = (*translated(other), other)
    except T2NError:
        raise refusal from refusal.__cause__
    warnings.warn(
        f"{kind}: sizes are taken for {', '.join(map(str, sizes))}, and tract refuses others. Without that: {refusal.message}",
        stacklevel=3,
    )
    return found


def _tell_conditions(kind: str, graph: TorchModuleIRGraph, *, refused: bool) -> None:
    """Warn of sizes at which the module does something else than the archive.

    Raises:
        SpecializedAxisError: the engine would run there all the same.
    """
    for condition in (each for each in graph.conditions if not each.stated):
        where = f" at {condition.source}" if condition.source else ""
        if not refused:
            raise SpecializedAxisError(
                f"{kind}{where}: the model does something else where {condition.text} does not hold.",
                "Make the axis static, or change that line so that it is right for every size.",
            )
        warnings.warn(
            f"{kind}{where}: the archive is right where {condition.text} ({condition.relation}), as it is in the example; "
            "elsewhere the module does something else, and tract refuses to run it.",
            stacklevel=3,
        )


@contextmanager
def _proven(target: Path) -> Iterator[Path]:
    """Yield the name under which an archive waits for its check; it takes the target's name when the block ends well.

    One that fails its check keeps the name, for who looks for the reason; after anything else it is deleted.
    """
    waiting = failed_path(target)
    try:
        yield waiting
    except T2NError:
        raise
    except BaseException:
        delete(waiting)
        raise
    put_in_place(waiting, target)


def _example_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: TorchModuleIRGraph
) -> ExampleRun:
    answered = call_example(model, args, kwargs)
    if len(answered.outputs) != len(graph.outputs):
        raise CaptureError(
            f"{type(model).__name__} returned {len(answered.outputs)} tensors, its graph {len(graph.outputs)}."
        )
    return ExampleRun.from_tensors(answered.call.tensors, answered.outputs, graph.output_names)


def _completed(given: Sequence[str] | None, own: Sequence[str]) -> Sequence[str] | None:
    """Return as many names as there are tensors: those given, then the tensors' own."""
    return given if given is None else (*given[: len(own)], *own[len(given) :])


__all__ = ["export_model_to_nnef"]

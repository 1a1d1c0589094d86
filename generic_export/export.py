"""`export_model_to_nnef`: any `nn.Module` to a checked NNEF archive, the five rooms in order."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from generic_export.assertions import Assertion, enforced, held, parse_extensions, warn_of_conditions
from generic_export.capture import Prepared, class_name, evaluation_mode, prepare
from generic_export.compare.other_sizes import Elsewhere, compare_elsewhere, elsewhere, sizes_beside
from generic_export.documents import module_classes, producer_properties, translate_graph, with_tensors
from generic_export.errors import (
    CaptureError,
    DimensionError,
    EngineError,
    EngineLoadError,
    GraphError,
    MismatchError,
    OptionError,
    SpecializedAxisError,
    T2NError,
    TranslationError,
)
from generic_export.half_weights import half_parameters, half_sources, rounded_to_half, stored_in_half
from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.example import ExampleCall, ExampleRun, call_example
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.logs import logging_at
from generic_export.module_forms import call_of, computing_in, unwrapped_module
from generic_export.nnef.composition import Composition, compose
from generic_export.nnef.graph import NnefGraph
from generic_export.nnef.half_storage import store_in_half
from generic_export.opened_archive import name_properties
from generic_export.tested_versions import TORCH, TRACT, new_doubts
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.naming import DEFAULT_VARNAME_SCHEME, VariableNamingScheme
from generic_export.torch_graph.nested import FlatCall
from generic_export.torch_graph.request import auto_symbols
from generic_export.torch_graph.sizes.fixed_axes import auto_axes, equal_symbols, with_sizes
from generic_export.torch_graph.sizes.multiples import declared_too
from generic_export.translate.translate import TranslationOptions
from generic_export.write.document import write_document
from generic_export.write.journal import delete
from generic_export.write.output_path import archive_format_of, check_target, failed_path, level_for, put_in_place
from generic_export.write.weights_only import (
    export_tensors_from_disk_to_nnef,
    export_tensors_to_nnef,
    iter_torch_tensors_from_disk,
)

logger = logging.getLogger("generic_export")


def export_model_to_nnef(
    model: nn.Module | ExportedProgram,
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
    dtype: torch.dtype | None = None,
) -> Path:
    """Export a module to an NNEF archive and compare it with PyTorch in the target's engine.

    Args:
        model: the module. It is captured in eval mode and restored afterwards. An `ExportedProgram` of torch.export is exported
            as its module; without `args` and `kwargs` with its own example, and without dynamic axes with its own. Of a module
            in `torch.compile` or `DataParallel`, the one inside is exported.
        args: example inputs of the forward; a tensor stands for a tuple of one. Dicts, dataclasses, tuples and lists of tensors
            become one input per tensor.
        file_path_export: path to write. The suffixes `.tar`, `.tgz` and `.tar.gz` select the form; other names get the suffix
            of `compression_level`.
        inference_target: `TractNNEF` or `KhronosNNEF`, with the dynamic axes and the settings of the check.
        input_names: one name per input tensor; None for the forward's parameter names (`batch.ids.0` for nested ones).
        output_names: one name per output tensor; None for `output`, or `output_0`, `output_1`, ..., or the names in the
            returned dict or dataclass.
        compression_level: None for a directory, 0 for `.tar`, 1 to 9 for `.tgz`. With the suffix `.tgz`, 0 selects the default
            level.
        log_level: level of the `generic_export` logger during the call; None does not change it.
        nnef_variable_naming_scheme: a `VariableNamingScheme` or its text: `natural_verbose`, `natural_verbose_camel`, `raw`
            or `numeric`.
        check_io_names_qte_match: require one name per tensor. False ignores surplus names and derives missing ones.
        debug_bundle_path: `.tgz` to write if the check fails; see `assert_io_and_debug_bundle`. None writes none.
        custom_extensions: relations between sizes that tract may assume, such as `S >= 1` or the full line
            `extension tract_assert S >= 1`. They must hold for the example.
        allow_same_io_names: allow an output with the name of an input; it is written as `<name>_output`.
        auto_harden_jit: specialize copies of ScriptModules for the example inputs; see `harden_jit_for_export`. Branches that
            depend on a dynamic size are kept. False keeps every branch.
        overwrite: replace an existing archive. If the export fails, the existing archive is kept.
        kwargs: keyword arguments of the forward.
        fragments: write repeated modules, such as the layers of a stack, as calls of one fragment.
        half: store f32 parameters of rank 2 or more in f16 and compute in f32. The check compares with the module whose
            parameters are rounded in the same way. Parameters outside the range of f16 stay in f32.
        dtype: compute in f32 or f16, whatever the module's dtype (tract has no bfloat16). The check compares with the module in
            that dtype. None keeps the module's dtype.

    Returns:
        The path of the archive.

    Raises:
        OptionError: names, dynamic axes or extensions do not fit the module.
        CaptureError: PyTorch cannot capture the module, or the module restricts a dynamic axis to one size.
        TranslationError: an operator has no NNEF form.
        ArchiveError: the archive cannot be written.
        EngineError: the engine refused the archive or failed to run it. It is kept as `<name>.failed.<suffix>`.
        MismatchError: the engine's outputs differ from PyTorch's. The archive is kept as above.
    """
    for doubt in new_doubts(TORCH, TRACT):
        warnings.warn(doubt, stacklevel=2)
    assertions = parse_extensions(custom_extensions)
    level = level_for(file_path_export, compression_level)
    target_path, _ = archive_format_of(file_path_export, level)
    check_target(target_path, overwrite)
    if debug_bundle_path is not None and not (isinstance(inference_target, TractNNEF) and inference_target.check_io):
        raise OptionError("debug_bundle_path requires a check.", "Use TractNNEF with check_io=True.")
    if fragments and not isinstance(inference_target, TractNNEF):
        raise OptionError("fragments are supported for tract only.", "Omit fragments, or use TractNNEF.")
    if half and not isinstance(inference_target, TractNNEF):
        raise OptionError("half mixes dtypes, which tract only supports.", "Omit half, or use TractNNEF.")
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = dict(kwargs or {})
    if isinstance(model, ExportedProgram):
        called = call_of(model, arguments, keywords)
        model, arguments, keywords = called.module, called.args, dict(called.kwargs)
        if not inference_target.dynamic_axes:
            inference_target = inference_target.with_dynamic_axes(called.dynamic_axes)
    model = unwrapped_module(model)
    with (
        logging_at(log_level, logger.name),
        evaluation_mode(model),
        computing_in(dtype, model, arguments, keywords) as (arguments, keywords),
    ):
        if not check_io_names_qte_match:
            answered = call_example(model, arguments, keywords)
            input_names = _completed(input_names, answered.call.names)
            output_names = _completed(output_names, answered.output_names)

        bundle = None if debug_bundle_path is None else Path(debug_bundle_path)
        how = _Writing(target_path, level, overwrite, half, fragments, bundle)

        def attempt(target: InferenceTarget) -> None:
            with _told_of_skipped_padding(model):
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
            _write_where_possible(prepared, target, how, assertions, nnef_variable_naming_scheme)

        _as_declared(attempt, inference_target, class_name(model))
    return target_path


@dataclass(frozen=True)
class _Writing:
    """How an archive is written.

    Attributes:
        path: where.
        level: how much a `.tgz` is compressed; None for no archive.
        overwrite: replace what is there.
        half: store parameters in half precision.
        fragments: write a fragment for each class of modules.
        bundle: the debug bundle of a check that fails; None for none.
    """

    path: Path
    level: int | None
    overwrite: bool
    half: bool
    fragments: bool
    bundle: Path | None


def _write_where_possible(
    prepared: Prepared,
    target: InferenceTarget,
    how: _Writing,
    assertions: Sequence[Assertion],
    naming_scheme: VariableNamingScheme | str,
) -> None:
    """Translate and write what was captured; axes of `Dim.AUTO` with which that fails become static, and a warning names them.

    Raises:
        T2NError: as `export_model_to_nnef`.
    """
    call = FlatCall.of(prepared.model, prepared.args, prepared.kwargs)
    reasons: list[str] = []
    while True:
        try:
            document = _document(prepared, target, assertions, naming_scheme)
            _write(prepared, document, target, how)
            break
        except (DimensionError, TranslationError, EngineError, MismatchError) as error:
            sizes = prepared.graph.sizes(call.tensors)
            auto = auto_symbols(target.dynamic_axes).intersection(sizes)
            chosen = auto.intersection(error.symbols) or auto
            if not chosen:
                raise
            merged = equal_symbols({name: sizes[name] for name in auto}, chosen)
            reasons += [] if merged else [error.message]
            graph = with_sizes(prepared.graph, merged or {name: sizes[name] for name in chosen})
            prepared = replace(prepared, graph=graph)
    found = auto_axes(target.dynamic_axes, prepared.graph)
    if found:
        warnings.warn(f"{class_name(prepared.model)}: {found}{' '.join(('', *reasons))}", stacklevel=5)


def _write(prepared: Prepared, document: NnefGraph, target: InferenceTarget, how: _Writing) -> None:
    """Write the archive, and let the target prove it under another name before it takes its own.

    Raises:
        T2NError: as `export_model_to_nnef`; an `EngineLoadError` knows what PyTorch assumed of sizes.
    """
    model, checked = prepared.model, target.check_io
    _tell_conditions(prepared, target)
    document = store_in_half(document, half_parameters(model)) if how.half else document
    with ExitStack() as stack:
        if how.half and checked:  # what is compared, here and in a search for a fault, has the archive's numbers
            stack.enter_context(rounded_to_half(model, stored_in_half(document)))
        begun = time.perf_counter()
        example = _example_run(model, prepared.args, prepared.kwargs, prepared.graph) if checked else None
        spent = time.perf_counter() - begun
        document, stored = with_tensors(document, prepared.sources)
        stored = half_sources(document, stored) if how.half else stored
        forms = compose(document, module_classes(model)) if how.fragments else Composition(document, document)
        archive = stack.enter_context(_proven(how.path)) if checked else how.path
        overwrite = how.overwrite or checked
        write_document(archive, forms.composed, stored, compression_level=how.level, overwrite=overwrite)
        logger.info("wrote %s", archive)

        def failing(prepared: Prepared, run: ExampleRun | None) -> AbstractContextManager[None]:
            if run is None or how.bundle is None or not isinstance(target, TractNNEF):
                return nullcontext()
            from generic_export.debug.archive.debug_bundle import bundled_failure, write_failing_case

            return bundled_failure(partial(write_failing_case, how.bundle, archive, run, prepared, forms.flat, target))

        begun = time.perf_counter()
        try:
            with failing(prepared, example):
                asked = ExampleCall(prepared.args, prepared.kwargs, example)
                target.post_export(model, forms.composed, asked, archive, how.bundle)
        except EngineLoadError as error:
            error.declarations = prepared.graph.declarations
            raise
        except MismatchError as error:
            if _skips_padding(model):
                raise MismatchError(error.message, f"{_PADDING_SKIPPED} {error.hint or ''}".strip()) from error
            raise
        spent += time.perf_counter() - begun
        if example is not None and isinstance(target, EngineTarget):
            _compare_elsewhere(prepared, target, archive, spent, failing)
    if example is not None:
        logger.info("checked %s in the engine", how.path)


def _tell_conditions(prepared: Prepared, target: InferenceTarget) -> None:
    """Warn of sizes at which the module does something else than the archive.

    Raises:
        SpecializedAxisError: the engine would run there all the same.
    """
    kind = class_name(prepared.model)
    conditions = [each for each in prepared.graph.conditions if not (each.stated or each.required)]
    if target.refuses_sizes:
        warn_of_conditions(kind, conditions)
    elif conditions:
        where = f" at {conditions[0].source}" if conditions[0].source else ""
        raise SpecializedAxisError(
            f"{kind}{where}: the model takes another branch where {conditions[0].text} does not hold.",
            "Make the axis static, or change that line so that it is correct for every size.",
        )


_PADDING_SKIPPED = (
    "In eval mode nn.TransformerEncoder skips the positions that src_key_padding_mask leaves out, and returns 0 there; the archive "
    "computes them. Call torch.backends.mha.set_fastpath_enabled(False), or make the encoder with enable_nested_tensor=False, "
    "and PyTorch computes what the archive does. Or do not read those positions."
)


def _skips_padding(model: nn.Module) -> bool:
    """Say whether a module has PyTorch's fast path for padded batches, which captures do not take."""
    return bool(_encoders_that_skip(model))


def _encoders_that_skip(model: nn.Module) -> list[nn.TransformerEncoder]:
    if not torch.backends.mha.get_fastpath_enabled():
        return []
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    return [encoder for encoder in encoders if encoder.enable_nested_tensor]


@contextmanager
def _told_of_skipped_padding(model: nn.Module) -> Iterator[None]:
    """Warn where an encoder that skips padding is captured with a mask: an example without padding shows no difference."""
    masked: list[bool] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        masked.append((args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")) is not None)

    with ExitStack() as stack:
        for encoder in _encoders_that_skip(model):
            stack.callback(encoder.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield
    if any(masked):
        warnings.warn(_PADDING_SKIPPED, stacklevel=4)


def _document(
    prepared: Prepared,
    target: InferenceTarget,
    assertions: Sequence[Assertion],
    naming_scheme: VariableNamingScheme | str,
) -> NnefGraph:
    """Translate what was captured.

    Raises:
        T2NError: as `translate_graph`; it knows what PyTorch assumed of sizes.
    """
    graph, kind = prepared.graph, class_name(prepared.model)
    logger.info("captured %s: %d operators", kind, len(graph.ops))
    relations = held(assertions, prepared)
    if target.refuses_sizes:
        relations += enforced(assertions, graph.conditions)
    names = name_properties([variable.name for variable in graph.inputs], graph.output_names)
    properties = tuple({**producer_properties(source_model=kind), **names}.items())
    options = TranslationOptions(naming_scheme=naming_scheme, assertions=relations, properties=properties)
    try:
        document = translate_graph(graph, target, options, prepared.model)
    except T2NError as error:
        error.declarations = graph.declarations
        raise
    logger.info("translated: %d operations, %d tensors", len(document.operations), len(document.variables))
    return document


def _as_declared(attempt: Callable[[InferenceTarget], None], target: InferenceTarget, kind: str) -> None:
    """Export for a target; where that is refused, for sizes as the module would have them declared.

    Raises:
        T2NError: the first refusal.
    """
    try:
        attempt(target)
        return
    except (CaptureError, DimensionError, GraphError, EngineLoadError) as error:
        refusal = error
    # Where a trace was tried after torch.export, its own refusal is the cause of this one.
    found = refusal.declarations or getattr(refusal.__cause__, "declarations", ())
    sizes = [size for size in found if size.name not in auto_symbols(target.dynamic_axes)]
    if not sizes or not target.refuses_sizes:
        raise refusal
    try:
        attempt(target.with_dynamic_axes(declared_too(target.dynamic_axes, sizes)))
    except T2NError:
        raise refusal from refusal.__cause__
    warnings.warn(
        f"{kind}: sizes are restricted to {', '.join(map(str, sizes))}, and tract refuses others. Without that: "
        f"{refusal.message}",
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
            f"{type(model).__name__} returned {len(answered.outputs)} tensors, but its graph has {len(graph.outputs)}."
        )
    return ExampleRun.from_tensors(answered.call.tensors, answered.outputs, graph.output_names)


def _compare_elsewhere(
    prepared: Prepared,
    target: EngineTarget,
    archive: Path,
    seconds: float,
    failing: Callable[[Prepared, ExampleRun], AbstractContextManager[None]],
) -> None:
    """Compare the archive at the sizes that `check_io_sizes` says, or at some where it may differ, for so many seconds.

    Raises:
        MismatchError: the archive answers otherwise than the module.
    """
    call = FlatCall.of(prepared.model, prepared.args, prepared.kwargs)
    example, given = prepared.graph.sizes(call.tensors), target.check_io_sizes
    if not example or not target.refuses_sizes:  # a stream comes in pieces of one size
        return
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in prepared.model.modules())
    if given is None:
        if (
            scripted or prepared.detour
        ):  # it took the branches of the example's values, and other values may take others
            return
        wanted = sizes_beside(prepared.graph, call.tensors, target.dynamic_axes)
    else:
        wanted, seconds = [{**example, **sizes} for sizes in given], math.inf
    if wanted:
        places = elsewhere(prepared.model, call, prepared.graph, wanted)

        def kept(place: Elsewhere) -> AbstractContextManager[None]:
            return failing(replace(prepared, args=place.args, kwargs=place.kwargs), place.run)

        auto = auto_symbols(target.dynamic_axes)
        compare_elsewhere(target, archive, class_name(prepared.model), places, seconds, kept, auto)


def _completed(given: Sequence[str] | None, own: Sequence[str]) -> Sequence[str] | None:
    """Return as many names as there are tensors: those given, then the tensors' own."""
    return given if given is None else (*given[: len(own)], *own[len(given) :])


__all__ = [
    "export_model_to_nnef",
    "export_tensors_from_disk_to_nnef",
    "export_tensors_to_nnef",
    "iter_torch_tensors_from_disk",
]

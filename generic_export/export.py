"""`export_model_to_nnef`: any `nn.Module` to a checked NNEF archive, the five rooms in order."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from generic_export.assertions import parse_extensions
from generic_export.capture import class_name, evaluation_mode, prepare
from generic_export.checked_archive import ArchiveWriting
from generic_export.errors import OptionError
from generic_export.export_attempts import as_declared, write_where_possible
from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.example import call_example
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.logs import logging_at
from generic_export.module_forms import call_of, computing_in, told_of_skipped_padding, unwrapped_module
from generic_export.tested_versions import TORCH, TRACT, new_doubts
from generic_export.torch_graph.naming import DEFAULT_VARNAME_SCHEME, VariableNamingScheme
from generic_export.write.output_path import archive_format_of, check_target, level_for
from generic_export.write.weights_only import (
    export_tensors_from_disk_to_nnef,
    export_tensors_to_nnef,
    iter_torch_tensors_from_disk,
)


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
        logging_at(log_level, "generic_export"),
        evaluation_mode(model),
        computing_in(dtype, model, arguments, keywords) as (arguments, keywords),
    ):
        if not check_io_names_qte_match:
            answered = call_example(model, arguments, keywords)
            input_names = _completed(input_names, answered.call.names)
            output_names = _completed(output_names, answered.output_names)

        bundle = None if debug_bundle_path is None else Path(debug_bundle_path)
        how = ArchiveWriting(target_path, level, overwrite, half, fragments, bundle)

        def attempt(target: InferenceTarget) -> None:
            with told_of_skipped_padding(model):
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
            write_where_possible(prepared, target, how, assertions, nnef_variable_naming_scheme)

        as_declared(attempt, inference_target, class_name(model))
    return target_path


def _completed(given: Sequence[str] | None, own: Sequence[str]) -> Sequence[str] | None:
    """Return as many names as there are tensors: those given, then the tensors' own."""
    return given if given is None else (*given[: len(own)], *own[len(given) :])


__all__ = [
    "export_model_to_nnef",
    "export_tensors_from_disk_to_nnef",
    "export_tensors_to_nnef",
    "iter_torch_tensors_from_disk",
]

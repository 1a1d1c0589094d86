"""Does an archive that exists already say what PyTorch says, and if not, why: one file to hand on.

In: an archive, the module it was exported from, arguments. Out: how close they are, or an error and a debug bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from generic_export.capture import evaluation_mode, prepare
from generic_export.documents import translate_graph
from generic_export.errors import OptionError, T2NError
from generic_export.export import bundled_failure, write_failing_case
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.check import (
    Comparison,
    ToleranceLimits,
    TractCheckTolerance,
    tolerance_of,
)
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.engines.npz_bundle import write_bundle
from generic_export.inference_target.tract.evidence.debug_bundle import BundleOptions
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.read.reading import GraphSignature, read_graph_text, signature_of
from generic_export.torch_graph.declared_axes import check_names
from generic_export.torch_graph.naming import identifier
from generic_export.translate.translate import TranslationOptions


def assert_io(
    model: nn.Module,
    test_input: torch.Tensor | Sequence[Any],
    nnef_file_path: str | Path,
    tract_cli: TractCli | TractNNEF | None = None,
    io_npz_path: str | Path | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    check_tolerance: TractCheckTolerance | ToleranceLimits | str | None = None,
    *,
    inference_target: TractNNEF | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[Comparison]:
    """Run an archive in the engine and compare every output with the module's.

    Args:
        model: the module that the archive was exported from; it is run in eval mode.
        test_input: arguments of its forward, of any size that the archive's symbols allow (a lone tensor for a tuple of one).
        nnef_file_path: folder, `.tar` or `.tgz`.
        tract_cli: the command that runs it; or a target, whose engine, registries and tolerance are taken; None for the
            newest release.
        io_npz_path: npz of inputs and PyTorch's outputs to write, for `assert_io_cmd_str`.
        input_names: which input of the archive each tensor is; None: they are in its order.
        output_names: which output of the archive each of the module's is; None: they are in its order.
        check_tolerance: how close is close; None: a target's own, and exactly equal in a command.
        inference_target: the target, by name.
        kwargs: keyword arguments of the forward.

    Returns:
        A comparison per output, all within the tolerance.

    Raises:
        EngineError: the engine refuses or cannot run the archive.
        MismatchError: an output is beyond the tolerance; says which, where and how much.
        OptionError: names that the archive does not have.
    """
    target = _target(tract_cli, inference_target, check_tolerance)
    archive = Path(nnef_file_path)
    with evaluation_mode(model):
        example = ExampleRun.of(model, _tuple(test_input), kwargs)
    del model  # what is left of a large module is freed before the engine loads the archive
    signature = signature_of(read_graph_text(archive))
    example = _in_order(example, signature, input_names, output_names)
    if io_npz_path is not None:
        inputs = dict(zip(signature.inputs, example.inputs, strict=True))
        write_bundle(Path(io_npz_path), [inputs], dict(zip(signature.outputs, example.outputs, strict=True)))
    return target.require_close(archive, example, target.ask(archive, example.inputs))


def assert_io_and_debug_bundle(
    model: nn.Module,
    test_input: torch.Tensor | Sequence[Any],
    nnef_file_path: str | Path,
    tract_cli: TractCli | TractNNEF | str | Path | None = None,
    io_npz_path: str | Path | TractNNEF | None = None,
    debug_bundle_path: str | Path | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    check_tolerance: TractCheckTolerance | ToleranceLimits | str | None = None,
    *,
    inference_target: TractNNEF | None = None,
    kwargs: Mapping[str, Any] | None = None,
    nnef_variable_naming_scheme: str = "natural_verbose",
    weight_seed: int | None = None,
    second_opinion: bool = True,
) -> list[Comparison]:
    """Do as `assert_io`, and when that fails write the case as one file.

    The bundle holds the archive, inputs and outputs, what PyTorch captured, versions, two ways to repeat the check, and the
    first tensor that differs with the module that makes it. It holds no user or host name, folder or environment variable.

    Args:
        model, test_input, nnef_file_path, tract_cli, io_npz_path, input_names, output_names, check_tolerance,
            inference_target, kwargs: see `assert_io`; a target is the one that was exported for.
        debug_bundle_path: the `.tgz` to write; None writes none. A path in the place of `tract_cli`, a target behind it, is
            understood too.
        nnef_variable_naming_scheme: the one that was exported with.
        weight_seed: leave the parameters out and show the case with random ones that come from this seed.
        second_opinion: also run the module through ONNX in tract, when `onnx` and `onnxscript` are installed.

    Raises:
        EngineError, MismatchError: as `assert_io`; the hint says where the bundle is.
        ArchiveError: the bundle cannot be written.
    """
    if isinstance(tract_cli, (str, Path)):  # (..., bundle, target), the form that this function had first
        debug_bundle_path, tract_cli = tract_cli, None
    if isinstance(io_npz_path, TractNNEF):
        tract_cli, io_npz_path = io_npz_path, None
    target = _target(tract_cli, inference_target, check_tolerance)
    arguments, path = _tuple(test_input), Path(nnef_file_path)

    def write(bundle_path: Path, error: T2NError) -> Path:
        signature = signature_of(read_graph_text(path))
        check_names(target.dynamic_axes, signature.inputs, signature.outputs)
        with evaluation_mode(model):
            prepared = prepare(
                model,
                arguments,
                target,
                input_names or signature.inputs,
                output_names or signature.outputs,
                kwargs=kwargs,
                allow_same_io_names=True,
            )
            options = TranslationOptions(naming_scheme=nnef_variable_naming_scheme)
            document = translate_graph(prepared.graph, target, options, model)
            example = ExampleRun.of(model, arguments, kwargs)
            bundle = BundleOptions(weight_seed=weight_seed, second_opinion=second_opinion)
            return write_failing_case(bundle_path, path, example, prepared, document, target, error, bundle)

    with bundled_failure(None if debug_bundle_path is None else partial(write, Path(debug_bundle_path))):
        return assert_io(model, arguments, path, target, io_npz_path, input_names, output_names, kwargs=kwargs)


def _target(
    engine: TractCli | TractNNEF | None,
    target: TractNNEF | None,
    tolerance: TractCheckTolerance | ToleranceLimits | str | None,
) -> TractNNEF:
    """Return the target that asks the engine that was given, within the tolerance that was given."""
    if engine is not None and target is not None:
        raise OptionError("both tract_cli and inference_target say which engine to ask.", "Give one of them.")
    if isinstance(engine, TractCli):
        judged = TractCheckTolerance.EXACT if tolerance is None else tolerance
        return TractNNEF(engine.version, specific_tract_binary_path=engine.binary, check_io_tolerance=judged)
    given = engine or target or TractNNEF.latest()
    if not isinstance(given, TractNNEF):
        raise OptionError(f"a {type(given).__name__} cannot run an archive.", "Give a TractCli, or a TractNNEF.")
    return given if tolerance is None else replace(given, check_io_tolerance=tolerance_of(tolerance))


def _in_order(
    example: ExampleRun, signature: GraphSignature, inputs: Sequence[str] | None, outputs: Sequence[str] | None
) -> ExampleRun:
    """Return a run whose inputs and outputs stand in the order of the archive's."""
    taken = _by_name("input", signature.inputs, example.inputs, inputs)
    given = _by_name("output", signature.outputs, example.outputs, outputs)
    names = example.output_names if outputs is None else signature.outputs
    return ExampleRun(taken, given, names)


def _by_name(
    what: str, archived: Sequence[str], arrays: Sequence[np.ndarray], names: Sequence[str] | None
) -> Sequence[np.ndarray]:
    if names is None and len(arrays) == len(archived):
        return arrays
    named = [identifier(name) for name in (names or ())]
    if sorted(named) != sorted(archived) or len(named) != len(arrays):
        said = f", called {', '.join(names)}" if names is not None else ""
        raise OptionError(
            f"{len(arrays)} {what} tensors{said}; the archive has {len(archived)}.",
            f"Its {what}s are {', '.join(archived)}.",
        )
    found = dict(zip(named, arrays, strict=True))
    return [found[name] for name in archived]


def _tuple(args: torch.Tensor | Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(args, torch.Tensor):
        return (args,)
    if not isinstance(args, (tuple, list)):
        raise OptionError(f"the example input is a {type(args).__name__}.", "Give a tensor, or a tuple of arguments.")
    return tuple(args)


__all__ = ["assert_io", "assert_io_and_debug_bundle"]

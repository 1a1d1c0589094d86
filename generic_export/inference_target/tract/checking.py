"""Does an archive that exists already say what PyTorch says, and if not, why: one file to hand on.

In: an archive, the module it was exported from, arguments. Out: how close they are, or an error and a debug bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.capture import evaluation_mode
from generic_export.compare.comparison import Comparison, ToleranceLimits, TractCheckTolerance, tolerance_of
from generic_export.debug.archive.debug_bundle import BundleOptions
from generic_export.debug.archive.repeated_check import ArchiveCheck
from generic_export.errors import OptionError
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.engines.cli import TractCli
from generic_export.inference_target.tract.target import TractNNEF


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
    """Run an archive in tract and compare every output with the module's.

    Args:
        model: the module that was exported; it runs in eval mode.
        test_input: arguments of its forward, of any size that the archive allows; a tensor stands for a tuple of one.
        nnef_file_path: the archive: folder, `.tar` or `.tgz`.
        tract_cli: the `tract` command, or a target, whose engine, registries and tolerance are used; None for the newest
            release.
        io_npz_path: npz file to write with inputs and PyTorch's outputs, for `assert_io_cmd_str`; None writes none.
        input_names: the archive's input for each tensor; None for the archive's order.
        output_names: the archive's output for each output of the module; None for the archive's order.
        check_tolerance: allowed difference; None for the target's tolerance, or exact equality with a command.
        inference_target: the target, as a keyword.
        kwargs: keyword arguments of the forward.

    Returns:
        One comparison per output, all within the tolerance.

    Raises:
        EngineError: the engine refused the archive or failed to run it.
        MismatchError: an output exceeds the tolerance; the message names the output, the position and the difference.
        OptionError: the archive has no input or output of a given name.
    """
    target = _target(tract_cli, inference_target, check_tolerance)
    check = ArchiveCheck(Path(nnef_file_path), target, input_names, output_names, _path(io_npz_path))
    with evaluation_mode(model):
        example = ExampleRun.of(model, _tuple(test_input), kwargs)
    del model  # what is left of a large module is freed before the engine loads the archive
    return check.run(example)


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
    """Run `assert_io`; if it fails, write everything needed to reproduce the failure to one file.

    The bundle holds the archive, inputs and outputs, the captured graph, versions, two ways to repeat the check, and the first
    tensor that differs with the module that computes it. It contains no user name, host name, path or environment variable.

    Args:
        model: see `assert_io`.
        test_input: see `assert_io`.
        nnef_file_path: see `assert_io`.
        tract_cli: see `assert_io`; a target should be the one used for the export.
        io_npz_path: see `assert_io`.
        debug_bundle_path: `.tgz` to write; None writes none. A path passed as `tract_cli`, followed by a target, is accepted too.
        input_names: see `assert_io`.
        output_names: see `assert_io`.
        check_tolerance: see `assert_io`.
        inference_target: see `assert_io`.
        kwargs: see `assert_io`.
        nnef_variable_naming_scheme: naming scheme of the export.
        weight_seed: replace the parameters in the bundle by random ones from this seed.
        second_opinion: also run the module through ONNX in tract, if `onnx` and `onnxscript` are installed.

    Raises:
        EngineError: as `assert_io`; the hint names the bundle.
        MismatchError: as `assert_io`; the hint names the bundle.
        ArchiveError: the bundle cannot be written.
    """
    if isinstance(tract_cli, (str, Path)):  # (..., bundle, target), the form that this function had first
        debug_bundle_path, tract_cli = tract_cli, None
    if isinstance(io_npz_path, TractNNEF):
        tract_cli, io_npz_path = io_npz_path, None
    target = _target(tract_cli, inference_target, check_tolerance)
    check = ArchiveCheck(Path(nnef_file_path), target, input_names, output_names, _path(io_npz_path))
    return check.run_again(
        model,
        _tuple(test_input),
        kwargs,
        bundle_path=_path(debug_bundle_path),
        naming_scheme=nnef_variable_naming_scheme,
        options=BundleOptions(weight_seed=weight_seed, second_opinion=second_opinion),
    )


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


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _tuple(args: torch.Tensor | Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(args, torch.Tensor):
        return (args,)
    if not isinstance(args, (tuple, list)):
        raise OptionError(f"the example input is a {type(args).__name__}.", "Give a tensor, or a tuple of arguments.")
    return tuple(args)


__all__ = ["assert_io", "assert_io_and_debug_bundle"]

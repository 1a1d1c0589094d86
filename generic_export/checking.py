"""Does an archive that exists already say what PyTorch says, and if not, why: one file to hand on.

In: an archive, the module it was exported from, arguments. Out: how close they are, or an error and a debug bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.capture import evaluation_mode, prepare
from generic_export.documents import translate_graph
from generic_export.errors import OptionError, T2NError
from generic_export.export import bundled_failure, write_failing_case
from generic_export.inference_target.example import ExampleRun
from generic_export.inference_target.tract.check import Comparison
from generic_export.inference_target.tract.evidence.debug_bundle import BundleOptions
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.read.reading import read_graph_text, signature_of
from generic_export.translate.translate import TranslationOptions


def assert_io(
    model: nn.Module,
    args: torch.Tensor | tuple[Any, ...],
    archive: str | Path,
    inference_target: TractNNEF | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> list[Comparison]:
    """Run an archive in the engine and compare every output with the module's.

    Args:
        model: the module that the archive was exported from; it is run in eval mode.
        args: arguments of its forward, of any size that the archive's symbols allow (a lone tensor for a tuple of one).
        archive: folder, `.tar` or `.tgz`.
        inference_target: the engine's release and the tolerance; None for the newest release.
        kwargs: keyword arguments of the forward.

    Returns:
        A comparison per output, all within the tolerance.

    Raises:
        EngineError: the engine refuses or cannot run the archive.
        MismatchError: an output is beyond the tolerance; says which, where and how much.
    """
    target = inference_target or TractNNEF.latest()
    with evaluation_mode(model):
        example = ExampleRun.of(model, _tuple(args), kwargs)
    return target.require_close(Path(archive), example, target.ask(Path(archive), example.inputs))


def assert_io_and_debug_bundle(
    model: nn.Module,
    args: torch.Tensor | tuple[Any, ...],
    archive: str | Path,
    debug_bundle_path: str | Path,
    inference_target: TractNNEF | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    nnef_variable_naming_scheme: str = "natural_verbose",
    weight_seed: int | None = None,
    second_opinion: bool = True,
    output_names: Sequence[str] | None = None,
) -> list[Comparison]:
    """Do as `assert_io`, and when that fails write the case as one file.

    The bundle holds the archive, inputs and outputs, what PyTorch captured, versions, two ways to repeat the check, and the
    first tensor that differs with the module that makes it. It holds no user or host name, folder or environment variable.

    Args:
        model, args, archive, inference_target, kwargs: see `assert_io`; the target is the one that was exported for.
        debug_bundle_path: the `.tgz` to write.
        nnef_variable_naming_scheme: the one that was exported with.
        weight_seed: leave the parameters out and show the case with random ones that come from this seed.
        second_opinion: also run the module through ONNX in tract, when `onnx` and `onnxscript` are installed.
        output_names: names of the outputs, if they were given to the export.

    Raises:
        EngineError, MismatchError: as `assert_io`; the hint says where the bundle is.
        ArchiveError: the bundle cannot be written.
    """
    target = inference_target or TractNNEF.latest()
    arguments, path = _tuple(args), Path(archive)

    def write(error: T2NError) -> Path:
        signature = signature_of(read_graph_text(path))
        with evaluation_mode(model):
            prepared = prepare(
                model,
                arguments,
                target,
                _names(target, signature.inputs),
                output_names or signature.outputs,
                kwargs=kwargs,
                allow_same_io_names=True,
            )
            options = TranslationOptions(naming_scheme=nnef_variable_naming_scheme)
            document = translate_graph(prepared.graph, target, options)
            example = ExampleRun.of(model, arguments, kwargs)
            bundle = BundleOptions(weight_seed=weight_seed, second_opinion=second_opinion)
            return write_failing_case(Path(debug_bundle_path), path, example, prepared, document, target, error, bundle)

    with bundled_failure(write):
        return assert_io(model, arguments, path, target, kwargs=kwargs)


def _names(target: TractNNEF, identifiers: Sequence[str]) -> Sequence[str]:
    """Return the inputs' names: those of the archive, which the target's dynamic axes must be declared for."""
    unknown = [name for name in target.dynamic_axes if name not in identifiers]
    if unknown:
        raise OptionError(
            f"dynamic axes are declared for {unknown[0]!r}; the archive's inputs are {', '.join(identifiers)}.",
            "Name the inputs as the archive does.",
        )
    return identifiers


def _tuple(args: torch.Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    return (args,) if isinstance(args, torch.Tensor) else tuple(args)


__all__ = ["assert_io", "assert_io_and_debug_bundle"]

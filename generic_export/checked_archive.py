"""An archive that is written under a waiting name, compared with PyTorch in the engine, and then takes its own.

In: what was captured and its document. Out: a file, or the error of its check.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from generic_export.assertions import warn_of_conditions
from generic_export.capture import Prepared, class_name
from generic_export.compare.other_sizes import Elsewhere, compare_elsewhere, elsewhere, sizes_beside
from generic_export.documents import module_classes, with_tensors
from generic_export.errors import CaptureError, EngineLoadError, MismatchError, SpecializedAxisError, T2NError
from generic_export.half_weights import half_sources, in_half, rounded_to_half, stored_in_half
from generic_export.inference_target.base import InferenceTarget
from generic_export.inference_target.example import ExampleCall, ExampleRun, call_example
from generic_export.inference_target.tract.engine_target import EngineTarget
from generic_export.inference_target.tract.target import TractNNEF
from generic_export.module_forms import PADDING_SKIPPED, skips_padding
from generic_export.nnef.composition import Composition, compose
from generic_export.nnef.graph import NnefGraph
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.nested import FlatCall
from generic_export.write.document import write_document
from generic_export.write.journal import delete
from generic_export.write.output_path import failed_path, put_in_place

logger = logging.getLogger("generic_export")


@dataclass(frozen=True)
class ArchiveWriting:
    """How an archive is written.

    Attributes:
        path: where.
        level: compression level of a `.tgz`; None writes a directory.
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


def write_checked(prepared: Prepared, document: NnefGraph, target: InferenceTarget, how: ArchiveWriting) -> None:
    """Write the archive, and let the target prove it under another name before it takes its own.

    Raises:
        T2NError: as `export_model_to_nnef`; the `declarations` of an `EngineLoadError` are the sizes that the capture assumed.
    """
    model, checked = prepared.model, target.check_io
    _tell_conditions(prepared, target)
    document = in_half(document, model) if how.half else document
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
            if skips_padding(model):
                raise MismatchError(error.message, f"{PADDING_SKIPPED} {error.hint or ''}".strip()) from error
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

        compare_elsewhere(target, archive, class_name(prepared.model), places, seconds, kept)


__all__ = ["ArchiveWriting", "write_checked"]

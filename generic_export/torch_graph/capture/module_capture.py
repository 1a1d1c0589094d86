"""The capture of a module: torch.export runs it, operators that cannot stay are rewritten, and the graph is converted.

In: a `CaptureRequest`. Out: a `TorchModuleIRGraph` with the conditions on its sizes, or the exported program alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch.export import ExportedProgram

from generic_export.compat import guards_noted, shape_guards
from generic_export.errors import OptionError, T2NError
from generic_export.torch_graph.capture.archive_conditions import declared_conditions, settled_conditions, with_required
from generic_export.torch_graph.capture.causes import capture_error
from generic_export.torch_graph.capture.conversion import Conversion, check_symbolic
from generic_export.torch_graph.capture.exported_program import (
    CapturedProgram,
    capture_program,
    dynamic_shapes,
    sizes_decided,
)
from generic_export.torch_graph.capture.leaf_modules import kept_whole
from generic_export.torch_graph.capture.size_conditions import assumed_branches, right_elsewhere
from generic_export.torch_graph.capture.whole_sizes import Specializations, record_specializations
from generic_export.torch_graph.decompose.decomposition import decomposed, functional
from generic_export.torch_graph.decompose.masked_writes import without_masked_writes
from generic_export.torch_graph.decompose.patches import capture_patches
from generic_export.torch_graph.decompose.strided import with_known_strides
from generic_export.torch_graph.ir import TorchModuleIRGraph
from generic_export.torch_graph.nested import FlatCall, flat_forward
from generic_export.torch_graph.request import CaptureRequest
from generic_export.torch_graph.sizes.declared_axes import check_names, check_outputs, check_ranks
from generic_export.torch_graph.sizes.fixed_axes import with_sizes
from generic_export.torch_graph.sizes.multiples import DivisibleAxes, assumed
from generic_export.torch_graph.sizes.proofs import Branch


def capture_graph(request: CaptureRequest, specializations: Specializations) -> TorchModuleIRGraph:
    """Run torch.export and convert its graph.

    Args:
        request: the module and what is asked of its graph.
        specializations: receives sizes that the model fixes.

    Raises:
        CaptureError, SpecializedAxisError, OptionError: see `TorchModuleTracer.trace`.
    """
    call, names = _call(request)
    outputs: list[str] = []
    with _capturing(request, call, specializations) as result_names:
        found = _captured(request, call, names, specializations.lines)
        program, later = _rewritten(request, found.program, names, specializations.lines)
        outputs += result_names
    named = replace(request, input_names=names, output_names=request.output_names or tuple(outputs))
    held, changed = settled_conditions(
        request, found.program, (*found.branches, *later), call, names, specializations.lines
    )
    conditions = (*declared_conditions(request), *with_required(request, held, found.program, call, names))
    converted = Conversion(named, program, conditions)
    declarations = assumed(program, converted.symbols)
    graph = replace(converted.graph(), conditions=conditions, declarations=declarations)
    graph = with_sizes(graph, changed)
    check_outputs(request.dynamic_axes, names, dict(zip(graph.output_names, graph.outputs, strict=True)))
    return graph


def capture_functional(request: CaptureRequest, specializations: Specializations) -> ExportedProgram:
    """Run torch.export alone; returns a program without in-place operators.

    Args:
        request: the module; its `keep` is not used.
        specializations: receives sizes that the model fixes.

    Raises:
        CaptureError, SpecializedAxisError, OptionError: see `TorchModuleTracer.trace`.
    """
    call, names = _call(request)
    with _capturing(request, call, specializations):
        found = _captured(request, call, names, specializations.lines)
        settled_conditions(request, found.program, found.branches, call, names, specializations.lines)
        return functional(found.program)


def _rewritten(
    request: CaptureRequest, program: ExportedProgram, names: Sequence[str], specializations: Sequence[str]
) -> tuple[ExportedProgram, list[Branch]]:
    """Return a program of operators that can stay, and what the others' own code takes for granted of sizes."""
    known = len(shape_guards(program))
    with guards_noted(program), sizes_decided(within_tables=False, told=False) as decided:
        try:
            written = functional(program)
            without_masked_writes(written)
            with_known_strides(written)
            if request.keep is not None:
                written = decomposed(written, request.keep)
        except T2NError:
            raise
        except Exception as error:  # PyTorch's decompositions raise as many classes as its capture
            raise capture_error(request.module, error, specializations) from error
    return written, assumed_branches(request, CapturedProgram(written, tuple(decided)), names, after=known)


@contextmanager
def _capturing(request: CaptureRequest, call: FlatCall, specializations: Specializations) -> Iterator[Sequence[str]]:
    """Yield the names of the results, in a block in which the module is one that PyTorch captures well."""
    whole = kept_whole(request.module, request.whole)
    with (
        capture_patches(),
        whole,
        flat_forward(request.module, call) as result_names,
        record_specializations(specializations),
    ):
        yield result_names


def _call(request: CaptureRequest) -> tuple[FlatCall, tuple[str, ...]]:
    """Return the example as it is captured, and the names of its tensors."""
    call = FlatCall.of(request.module, request.args, request.kwargs)
    names = _checked_names(request, call)
    return DivisibleAxes.of(request.dynamic_axes).call(call, names), names


def _checked_names(request: CaptureRequest, call: FlatCall) -> tuple[str, ...]:
    names = call.names if request.input_names is None else tuple(request.input_names)
    if len(names) != len(call.tensors):
        raise OptionError(
            f"{len(call.tensors)} input tensors, but {len(names)} input names ({', '.join(names)}).",
            f"The tensors are: {', '.join(call.names)}.",
        )
    check_names(request.dynamic_axes, names, request.output_names)
    check_ranks(request.dynamic_axes, names, [tensor.shape for tensor in call.tensors])
    return names


def _captured(
    request: CaptureRequest, call: FlatCall, names: Sequence[str], specializations: Sequence[str]
) -> CapturedProgram:
    """Return what torch.export captures, and what is assumed of sizes that it is what the module does."""
    shapes = dynamic_shapes(request.dynamic_axes, call, names)
    try:
        found = capture_program(request.module, call, shapes)
    except T2NError:
        raise
    except Exception as error:  # torch.export raises many unrelated classes, none of them documented
        raise capture_error(request.module, error, specializations) from error
    check_symbolic(replace(request, input_names=names), found.program, specializations)
    named = replace(call, names=tuple(names))
    found, branches = right_elsewhere(request, found, assumed_branches(request, found, names), named, shapes)
    return replace(found, branches=tuple(branches))


__all__ = ["capture_functional", "capture_graph"]

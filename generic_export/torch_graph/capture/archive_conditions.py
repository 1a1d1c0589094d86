"""Conditions on sizes that an archive checks: those of the branches that a model took, and those that the user declared.

In: a captured program and the branches it took. Out: `SizeCondition`s, and what symbols become for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.export import ExportedProgram

from generic_export.torch_graph.capture.branches import shapes_with
from generic_export.torch_graph.capture.causes import refused
from generic_export.torch_graph.capture.conversion import symbol_names
from generic_export.torch_graph.capture.size_conditions import example_sizes
from generic_export.torch_graph.dims import Dim, dim_symbol
from generic_export.torch_graph.ir import SizeCondition
from generic_export.torch_graph.nested import FlatCall, resize_example
from generic_export.torch_graph.request import CaptureRequest, auto_symbols, declared_sizes
from generic_export.torch_graph.sizes.fixed_axes import join_changes, settled
from generic_export.torch_graph.sizes.guards import least_size, without_weaker
from generic_export.torch_graph.sizes.multiples import assumed
from generic_export.torch_graph.sizes.proofs import Branch
from generic_export.torch_graph.state import buffers_kept

_MOST_OPERATORS_CHECKED = 256
"""Sizes that the module refuses itself are refused by tract in graphs of so many operators.

Inception-v3, which has 314, is loaded in a quarter of the time without that.
"""


def settled_conditions(
    request: CaptureRequest,
    program: ExportedProgram,
    branches: Sequence[Branch],
    call: FlatCall,
    names: Sequence[str],
    specializations: Sequence[str],
) -> tuple[tuple[SizeCondition, ...], dict[str, Dim]]:
    """Return the conditions on sizes under which a program is what the module does, and what symbols become for them.

    Raises:
        SpecializedAxisError: tract has no words for one of them, and it is about an axis that was declared by name.
    """
    if not branches:
        return (), {}
    auto = auto_symbols(request.dynamic_axes)
    example = example_sizes(request, program, branches[0], call)
    symbols = symbol_names(replace(request, input_names=names), program)
    conditions: list[SizeCondition] = []
    changed: dict[str, Dim] = {}
    for branch in branches:
        held, sizes = settled(branch, example, symbols, auto)
        conditions += held
        join_changes(changed, sizes)
    for condition in conditions:
        if condition.relation is None:
            refusal = refused(request.module, condition, next(iter(specializations), ""))
            refusal.declarations = assumed(program, symbols)
            raise refusal
    return tuple(without_weaker(conditions)), changed


def with_required(
    request: CaptureRequest,
    conditions: Sequence[SizeCondition],
    program: ExportedProgram,
    call: FlatCall,
    names: Sequence[str],
) -> Iterator[SizeCondition]:
    """Yield conditions; in a large graph, a smallest size below which the module raises an error is required by itself."""
    if sum(node.op == "call_function" for node in program.graph.nodes) <= _MOST_OPERATORS_CHECKED:
        yield from conditions
        return
    example = [tensor.shape for tensor in call.tensors]
    symbols = symbol_names(replace(request, input_names=names), program)
    runs: bool | None = None  # whether the module has values to run with, once that is asked
    for condition in conditions:
        name, least = least_size(condition) or ("", 1)
        below = shapes_with(program, symbols, example, dim_symbol(name), least - 1) if least > 1 else None
        if below is not None and runs is None:
            runs = not _raises(request, call, example)
        yield replace(condition, required=below is not None and bool(runs) and _raises(request, call, below))


def _raises(request: CaptureRequest, call: FlatCall, shapes: Sequence[Sequence[int]]) -> bool:
    """Say whether the module raises an error for inputs of these shapes."""
    args, kwargs = call.arguments(list(map(resize_example, call.tensors, shapes)))
    with buffers_kept(request.module), torch.no_grad():
        try:
            request.module(*args, **kwargs)
        except Exception:  # a module may raise anything
            return True
    return False


def declared_conditions(request: CaptureRequest) -> tuple[SizeCondition, ...]:
    """Return what the user said of sizes, which the engine is to hold inputs to."""
    sizes = declared_sizes(request.dynamic_axes).values()
    return tuple(SizeCondition(relation, relation, "", stated=True) for size in sizes for relation in size.relations)


__all__ = ["declared_conditions", "settled_conditions", "with_required"]

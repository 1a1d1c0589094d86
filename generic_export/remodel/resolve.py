"""A plan held against a sub-graph: everything checked, everything decided.

In: a `Subgraph` and a `RemodelPlan`. Out: its `Boundary`, or an error that names the line of the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from generic_export.remodel.boundary import Boundary
from generic_export.remodel.inputs import declared_inputs, input_side, pinned_sizes, resized
from generic_export.remodel.outputs import kept_outputs, output_boundaries, runner
from generic_export.remodel.plan import Place, RemodelPlan, SubgraphPlan
from generic_export.remodel.subgraph import Signature, Subgraph
from generic_export.remodel.symbols import SymbolTable, relations_of


def resolve(subgraph: Subgraph, plan: RemodelPlan) -> Boundary:
    """Return what a plan makes of a sub-graph.

    Raises:
        OptionError: the plan names what the sub-graph does not have, or asks for what cannot be.
        CaptureError: the module returns something else than tensors.
    """
    own = plan.subgraphs.get(subgraph.name, SubgraphPlan())
    place = Place(plan.origin, (subgraph.name,))
    signature = Signature.of(subgraph)
    planned = declared_inputs(signature, own, place)
    table = SymbolTable.of([one.tensor for one in planned], own, place)
    pins = pinned_sizes(own, table, place)
    side = input_side(signature, planned, table, pins, place)
    relations = relations_of(table, side.fixed, own, place, subgraph.assertions, signature.declared)
    unbound = [
        resized(one.tensor.value, boundary.dims, side.fixed)
        for one, boundary in zip(planned, side.inputs, strict=True)
        if boundary.bound is None
    ]
    names = [output.name for output in signature.outputs]
    sizes = {symbol: side.fixed.get(symbol, size) for symbol, size in table.sizes.items() if symbol in side.carriers}
    run = runner(subgraph.module, side, unbound)
    outputs = output_boundaries(names, run, sizes, side.fixed, own, place)
    kept = kept_outputs(outputs, own, [one.outer_name for one in side.outer], place)
    example = [
        tensor.squeeze(one.collapsed) if one.collapsed else tensor
        for tensor, one in zip(unbound, side.outer, strict=True)
    ]
    return Boundary(subgraph.name, side, outputs, kept, relations, tuple(subgraph.assertions), tuple(example))


def require_known(subgraphs: Sequence[Subgraph], plan: RemodelPlan) -> None:
    """Refuse a plan for sub-graphs that do not exist.

    Raises:
        OptionError: see above.
    """
    names: Collection[str] = [subgraph.name for subgraph in subgraphs]
    for name in plan.subgraphs:
        if name not in names:
            raise Place(plan.origin, (name,)).unknown("sub-graph", name, names)

"""A plan to begin with: what a model's boundary is, written as a plan that changes nothing.

In: `Subgraph`s. Out: a `RemodelPlan` with the shape of every input and the name of every output.
"""

from __future__ import annotations

from collections.abc import Sequence

from generic_export.remodel.plan import InputPlan, RemodelPlan, SubgraphPlan
from generic_export.remodel.subgraph import Signature, Subgraph


def template_plan(subgraphs: Sequence[Subgraph]) -> RemodelPlan:
    """Return the plan that says what is there already.

    Raises:
        OptionError: a sub-graph's names or dynamic axes do not fit its module.
    """
    return RemodelPlan({subgraph.name: _template(subgraph) for subgraph in subgraphs})


def _template(subgraph: Subgraph) -> SubgraphPlan:
    signature = Signature.of(subgraph)
    return SubgraphPlan(
        inputs={tensor.name: InputPlan(shape=tensor.dims) for tensor in signature.inputs},
        outputs_keep=tuple(tensor.name for tensor in signature.outputs),
        assertions=tuple(subgraph.assertions),
    )

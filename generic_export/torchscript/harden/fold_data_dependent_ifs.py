"""Pass: an `if` on data is the branch that the example inputs take. The user is told: other data gets that branch too.

In: a script and example inputs. Out: the script with no `if` that the inputs reach, except one that they take both ways.
"""

from __future__ import annotations

import warnings

import torch

from generic_export.compat import JitGraph, JitNode
from generic_export.torchscript.harden.edits import Arguments, agreed, keep_branch, nodes_of, observed, remove_unread
from generic_export.torchscript.harden.uses import depends_on_inputs, depends_on_sizes
from generic_export.torchscript.schema import source_of


def fold_data_dependent_ifs(model: torch.jit.ScriptModule, args: Arguments, *, keep_sizes: bool = False) -> int:
    """Put, in place, the branch that example inputs take where an `if` stood; returns how many.

    Args:
        model: the script.
        args: example inputs, on which the conditions are evaluated.
        keep_sizes: leave conditions on sizes of tensors: they may differ from the example's.
    """
    graph = model.graph
    found = nodes_of(graph, "prim::If")
    if keep_sizes:
        found = [node for node in found if not depends_on_sizes(node.input())]
    if not found:
        return 0
    noted = observed(model, args, [node.input() for node in found])
    taken = {node.input().unique(): agreed(noted[node.input().unique()]) for node in found}
    told: list[str] = []
    folded = 0
    while (node := _decided(graph, taken)) is not None:
        condition = bool(taken[node.input().unique()][1])
        if depends_on_inputs(node.input()):
            told.append(f"{source_of(node) or 'an unrecorded line'} ({str(condition).lower()})")
        kept = 0 if condition else 1
        # The condition of another `if` may be a result of this one: it is what the branch computes from now on.
        for output, result in zip(node.outputs(), list(node.blocks())[kept].outputs(), strict=True):
            if output.unique() in taken:
                taken[result.unique()] = taken[output.unique()]
        keep_branch(node, kept)
        folded += 1
    if told:
        warnings.warn(
            f"{model.original_name}: an `if` on data is fixed to the outcome of the example inputs at "
            f"{', '.join(told)}.",
            stacklevel=2,
        )
    return remove_unread(graph, changes=folded)


def _decided(graph: JitGraph, taken: dict[int, tuple[bool, object]]) -> JitNode | None:
    nodes = nodes_of(graph, "prim::If")
    return next((node for node in nodes if taken.get(node.input().unique(), (False, None))[0]), None)

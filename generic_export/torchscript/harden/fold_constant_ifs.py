"""Pass: an `if` on a constant is the branch that it takes.

In: a script. Out: the same without those branches; nothing is assumed of its inputs.
"""

from __future__ import annotations

import torch

from generic_export.compat import JitGraph, JitNode
from generic_export.torchscript.harden.edits import Arguments, constant_of, keep_branch, nodes_of, remove_unread


def fold_constant_ifs(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Put, in place, the branch that is taken where an `if` on a constant stood; returns how many.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.
    """
    folded = 0
    while (node := _on_constant(model.graph)) is not None:
        _, condition = constant_of(node.input())
        keep_branch(node, 0 if condition else 1)
        folded += 1
    return remove_unread(model.graph, changes=folded)


def _on_constant(graph: JitGraph) -> JitNode | None:
    return next((node for node in nodes_of(graph, "prim::If") if constant_of(node.input())[0]), None)

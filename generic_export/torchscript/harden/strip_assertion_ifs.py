"""Pass: an `if` that raises in one branch is its other branch; no engine raises.

In: a script. Out: the same without its checks of the inputs.
"""

from __future__ import annotations

import torch

from generic_export.compat import JitGraph, JitNode
from generic_export.torchscript.harden.edits import Arguments, keep_branch, nodes_of, remove_unread


def strip_assertion_ifs(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Remove, in place, each `if` of which one branch always raises; returns how many.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.
    """
    stripped = 0
    while (found := _assertion(model.graph)) is not None:
        node, harmless = found
        keep_branch(node, harmless)
        stripped += 1
    return remove_unread(model.graph, changes=stripped)


def _assertion(graph: JitGraph) -> tuple[JitNode, int] | None:
    """Return an `if` with one branch that raises, and the number of the other branch."""
    for node in nodes_of(graph, "prim::If"):
        raising = [any(inner.kind() == "prim::RaiseException" for inner in block.nodes()) for block in node.blocks()]
        if raising.count(True) == 1:
            return node, raising.index(False)
    return None

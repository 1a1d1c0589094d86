"""Pass: `tensor.data` is the tensor; an engine computes no gradients.

In: a script. Out: the same without `prim::data`.
"""

from __future__ import annotations

import torch

from generic_export.torchscript.harden.edits import Arguments, nodes_of, remove_unread


def strip_prim_data(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Remove, in place, each `prim::data`; returns how many.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.
    """
    found = nodes_of(model.graph, "prim::data")
    for node in found:
        node.output().replaceAllUsesWith(node.input())
        node.destroy()
    return remove_unread(model.graph, changes=len(found))

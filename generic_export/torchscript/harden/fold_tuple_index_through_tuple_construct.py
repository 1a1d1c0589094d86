"""Pass: an element of a tuple that was just made is what the tuple was made of.

In: a script. Out: the same with fewer tuples; nothing is assumed of its inputs.
"""

from __future__ import annotations

import torch

from generic_export.torchscript.harden.edits import Arguments, constant_of, nodes_of, remove_unread


def fold_tuple_index_through_tuple_construct(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Read elements, in place, from where a tuple got them; returns how many.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.
    """
    folded = 0
    for node in nodes_of(model.graph, "prim::TupleIndex"):
        made, index_value = node.inputs()
        known, index = constant_of(index_value)
        if known and made.node().kind() == "prim::TupleConstruct":
            node.output().replaceAllUsesWith(list(made.node().inputs())[index])
            node.destroy()
            folded += 1
    return remove_unread(model.graph, changes=folded)

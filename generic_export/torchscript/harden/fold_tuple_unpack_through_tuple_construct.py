"""Pass: a tuple that is made and taken apart again is its elements.

In: a script. Out: the same with fewer tuples; nothing is assumed of its inputs.
"""

from __future__ import annotations

import torch

from generic_export.torchscript.harden.edits import Arguments, nodes_of, remove_unread


def fold_tuple_unpack_through_tuple_construct(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Read, in place, what a tuple was made of where it is unpacked; returns how many unpackings.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.
    """
    folded = 0
    for node in nodes_of(model.graph, "prim::TupleUnpack"):
        made = node.input().node()
        if made.kind() == "prim::TupleConstruct":
            for output, element in zip(list(node.outputs()), list(made.inputs()), strict=True):
                output.replaceAllUsesWith(element)
            node.destroy()
            folded += 1
    return remove_unread(model.graph, changes=folded)

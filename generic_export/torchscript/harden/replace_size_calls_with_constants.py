"""Pass: sizes that only decide something are what they are for the example inputs.

In: a script and example inputs. Out: the script without those `aten::dim`, `size`, `len` and `numel`; sizes that reach the shape
of a tensor stay.
"""

from __future__ import annotations

import torch

from generic_export.torchscript.harden.edits import (
    Arguments,
    agreed,
    nodes_of,
    observed,
    remove_unread,
    replace_by_constant,
)
from generic_export.torchscript.harden.uses import SIZE_CALLS, decides_only, owners_of_returns


def replace_size_calls_with_constants(
    model: torch.jit.ScriptModule, args: Arguments, *, ranks_only: bool = False
) -> int:
    """Fold, in place, calls of `dim`, `size`, `len` and `numel` whose values flow only into control flow.

    Args:
        model: the script.
        args: example inputs, which give the sizes.
        ranks_only: leave all but `dim`: sizes may differ from the example's.

    Returns:
        How many calls were folded.
    """
    graph = model.graph
    owners = owners_of_returns(graph)
    kinds = ("aten::dim",) if ranks_only else SIZE_CALLS
    calls = [node for node in nodes_of(graph, *kinds) if decides_only(node.output(), owners)]
    if not calls:
        return 0
    noted = observed(model, args, [node.output() for node in calls])
    folded = 0
    for node in calls:
        same, size = agreed(noted[node.output().unique()])
        if same:
            replace_by_constant(graph, node.output(), size)
            folded += 1
    return remove_unread(graph, changes=folded)

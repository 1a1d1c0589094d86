"""Pass: calls of submodules and functions are what they call, and plain attributes their values.

In: a script that cannot be frozen. Out: the script in one graph; tensors stay attributes.
"""

from __future__ import annotations

from typing import Any

import torch

from generic_export.compat import JitValue, inline_calls
from generic_export.torchscript.harden.edits import Arguments, nodes_of, remove_unread, replace_by_constant
from generic_export.torchscript.scalars import NOT_HERE

CALLS = ("prim::CallMethod", "prim::CallFunction")
_PLAIN = (bool, int, float, str, type(None))


def inline_unresolvable_submodules(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Inline calls, in place, and read attributes that are numbers, strings or None and that nobody writes.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.

    Returns:
        How many calls and attributes were resolved.
    """
    graph = model.graph
    before = len(nodes_of(graph, *CALLS))
    if before:
        inline_calls(graph)
    resolved = before - len(nodes_of(graph, *CALLS))
    written = {node.s("name") for node in nodes_of(graph, "prim::SetAttr")}
    for node in nodes_of(graph, "prim::GetAttr"):
        value = NOT_HERE if node.s("name") in written else _attribute(model, node.output())
        if type(value) in _PLAIN:
            replace_by_constant(graph, node.output(), value)
            resolved += 1
    return remove_unread(graph, changes=resolved)


def _attribute(model: torch.jit.ScriptModule, value: JitValue) -> Any:
    """Return what a chain of attributes of the root leads to; NOT_HERE when it starts elsewhere."""
    node = value.node()
    if node.kind() == "prim::Param":
        return model if value.unique() == next(model.graph.inputs()).unique() else NOT_HERE
    if node.kind() != "prim::GetAttr":
        return NOT_HERE
    owner = _attribute(model, node.input())
    return NOT_HERE if owner is NOT_HERE else getattr(owner, node.s("name"), NOT_HERE)

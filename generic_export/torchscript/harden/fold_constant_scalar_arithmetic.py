"""Pass: arithmetic, comparisons and look-ups on constants are their results.

In: a script. Out: the same with fewer nodes; nothing is assumed of its inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from generic_export.compat import JitNode
from generic_export.torchscript.harden.edits import (
    Arguments,
    constant_of,
    every_node,
    remove_unread,
    replace_by_constant,
)
from generic_export.torchscript.scalars import NOT_HERE, as_declared, evaluate

# What neither writes nor depends on anything but its arguments.
_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "div", "floordiv", "floor_divide", "remainder", "neg", "pow", "abs", "min", "max"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "__xor__", "__not__", "__is__", "__isnot__"}
    | {"ceil", "floor", "round", "trunc", "sqrt", "exp", "log", "log2", "log10", "__lshift__", "__rshift__"}
    | {"Int", "Float", "Bool", "Scalar", "ScalarImplicit", "IntImplicit", "FloatImplicit", "len", "format"}
    | {"__contains__", "__getitem__", "__range_length", "__derive_index"}
)
_NEVER_NONE = frozenset({"prim::TupleConstruct", "prim::ListConstruct", "prim::DictConstruct", "prim::NumToTensor"})
_RESULTS = (bool, int, float, str)


def fold_constant_scalar_arithmetic(model: torch.jit.ScriptModule, args: Arguments = ()) -> int:
    """Fold, in place, operators on constant numbers, strings and lists of them; returns how many.

    Args:
        model: the script.
        args: not used; every pass may be called with the example inputs.
    """
    graph = model.graph
    folded = 0
    for node in every_node(graph):
        result = _result(node)
        if result is not NOT_HERE:
            replace_by_constant(graph, node.output(), result)
            folded += 1
    return remove_unread(graph, changes=folded)


def _result(node: JitNode) -> Any:
    """Return what an operator on constants gives, or NOT_HERE."""
    namespace, _, name = node.kind().partition("::")
    if namespace not in {"aten", "prim"} or name not in _ARITHMETIC or node.outputsSize() != 1:
        return NOT_HERE
    if name in {"__is__", "__isnot__"} and _compared_with_none(node):
        return name == "__isnot__"
    known = [constant_of(value) for value in node.inputs()]
    values = [value for _, value in known]
    if not all(found for found, _ in known) or any(isinstance(value, torch.Tensor) for value in values):
        return NOT_HERE
    try:
        result = as_declared(node.output().type().kind(), evaluate(name, values))
    except (ArithmeticError, ValueError, LookupError, TypeError):
        return NOT_HERE  # the script raises there too, if it ever comes there
    return result if type(result) in _RESULTS else NOT_HERE


def _compared_with_none(node: JitNode) -> bool:
    """Say whether a value that cannot be None is compared with None."""
    left, right = node.inputs()
    for value, other in ((left, right), (right, left)):
        never_none = value.node().kind() in _NEVER_NONE or value.type().kind() == "TensorType"
        if never_none and constant_of(other) == (True, None):
            return True
    return False

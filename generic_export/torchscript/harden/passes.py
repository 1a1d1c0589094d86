"""The passes of hardening: each is a function of a script and example inputs that edits the script in place.

In: a script, and example inputs where a pass needs them. Out: how many changes were made. Only `fold_data_dependent_ifs` and
`replace_size_calls_with_constants` assume something of the inputs: what the examples decide, and the sizes that decide something.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from generic_export.compat import JitGraph, JitNode, JitValue, inline_calls
from generic_export.torchscript.harden.edits import (
    Arguments,
    agreed,
    constant_of,
    every_node,
    keep_branch,
    nodes_of,
    observed,
    remove_unread,
    replace_by_constant,
)
from generic_export.torchscript.harden.uses import (
    SIZE_CALLS,
    decides_only,
    depends_on_inputs,
    depends_on_sizes,
    owners_of_returns,
)
from generic_export.torchscript.scalars import NOT_HERE, as_declared, evaluate
from generic_export.torchscript.schema import source_of


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

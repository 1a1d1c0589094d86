"""What the passes share: walking a TorchScript graph, constants in it, a branch put in the place of its `if`.

In: live graphs of ScriptModules. Out: the same graphs, edited in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from generic_export.compat import JitBlock, JitGraph, JitNode, JitValue, remove_dead_code
from generic_export.errors import CaptureError, OptionError, T2NError, first_line
from generic_export.torch_graph.nested import forward_signature
from generic_export.torchscript.module import interpreted

Arguments = torch.Tensor | tuple[Any, ...]
"""Example arguments of a forward; a lone tensor stands for a tuple of one."""

# Containers that one of these writes to are no constants.
_WRITES = frozenset(
    f"aten::{name}" for name in ("append", "extend", "insert", "pop", "clear", "reverse", "sort", "_set_item", "Delete")
)


def as_tuple(args: Arguments) -> tuple[Any, ...]:
    """Return example arguments as a tuple."""
    return (args,) if isinstance(args, torch.Tensor) else tuple(args)


def bound_arguments(model: torch.jit.ScriptModule, args: Arguments) -> tuple[Any, ...]:
    """Return a value per parameter of a script's forward, defaults filled in; tensors are copies.

    Raises:
        OptionError: the forward does not take such arguments.
    """
    signature = forward_signature(model)
    try:
        bound = signature.bind(model, *as_tuple(args))
    except TypeError as error:
        own = inspect.Signature(list(signature.parameters.values())[1:])
        raise OptionError(
            f"{model.original_name}.forward{own} does not accept the example arguments: {error}."
        ) from None
    bound.apply_defaults()
    return tuple(
        value.detach().clone() if isinstance(value, torch.Tensor) else value
        for value in tuple(bound.arguments.values())[1:]
    )


def every_node(owner: JitGraph | JitBlock) -> Iterator[JitNode]:
    """Yield the nodes of a graph in order, an `if` or loop before what is inside of it.

    Taken from a list: the node that was yielded may be destroyed or moved.
    """
    for node in list(owner.nodes()):
        blocks = list(node.blocks())
        yield node
        for block in blocks:
            yield from every_node(block)


def nodes_of(graph: JitGraph, *kinds: str) -> list[JitNode]:
    """Return the nodes of some kinds, those inside of branches and loops included."""
    return [node for node in every_node(graph) if node.kind() in kinds]


def node_count(graph: JitGraph) -> int:
    """Return how many nodes a graph has, branches and loops included and constants left out."""
    return sum(node.kind() != "prim::Constant" for node in every_node(graph))


def constant_of(value: JitValue) -> tuple[bool, Any]:
    """Return whether a value is known from the graph alone, and what it is: numbers, strings, None, lists of those."""
    node = value.node()
    if node.kind() == "prim::Constant":
        return True, value.toIValue()
    if node.kind() not in {"prim::ListConstruct", "prim::TupleConstruct"} or _is_written(value):
        return False, None
    known = [constant_of(element) for element in node.inputs()]
    elements = [element for _, element in known]
    together = elements if node.kind() == "prim::ListConstruct" else tuple(elements)
    return all(found for found, _ in known), together


def _is_written(value: JitValue) -> bool:
    return any(use.user.kind() in _WRITES or use.user.kind() == "prim::Return" for use in value.uses())


def replace_by_constant(graph: JitGraph, value: JitValue, constant: Any) -> None:
    """Let every reader of a value read a constant instead."""
    with graph.insert_point_guard(value.node()):
        replacement = graph.insertConstant(constant)  # type: ignore[attr-defined]
    value.replaceAllUsesWith(replacement)


def keep_branch(node: JitNode, index: int) -> None:
    """Put one branch of a `prim::If` in its place (0: true, 1: false)."""
    block = list(node.blocks())[index]
    results = list(block.outputs())
    for inner in list(block.nodes()):
        inner.moveBefore(node)
    for output, result in zip(list(node.outputs()), results, strict=True):
        output.replaceAllUsesWith(result)
    node.destroy()


def remove_unread(graph: JitGraph, *, changes: int) -> int:
    """Remove nodes whose results nobody reads, if a pass changed something; returns the count of changes."""
    if changes:
        remove_dead_code(graph)
    return changes


def observed(model: torch.jit.ScriptModule, args: Arguments, values: list[JitValue]) -> dict[int, list[Any]]:
    """Run a script on example inputs and note what some of its values are, each time that they are computed.

    Returns:
        What each value was, by its number in the graph; values that the run did not come by have an empty list.

    Raises:
        CaptureError: the model raises on these inputs, or does what only TorchScript can.
        OptionError: the forward does not take such arguments.
    """
    noted: dict[int, list[Any]] = {value.unique(): [] for value in values}
    plain, arguments = interpreted(model, graph=model.graph), bound_arguments(model, args)
    try:
        with torch.no_grad():
            plain.run_script(arguments, noted)
    except T2NError:
        raise
    except Exception as error:  # whatever the model's own operators raise
        where = f" at {source}" if (source := getattr(error, "t2n_source", "")) else ""
        raise CaptureError(
            f"{model.original_name}{where}: cannot be run on the example inputs: {first_line(error)}",
            "Use arguments that the script accepts.",
        ) from error
    return noted


def agreed(noted: list[Any]) -> tuple[bool, Any]:
    """Return whether all that was noted of a value is the same, and what that is."""
    return bool(noted) and all(item == noted[0] for item in noted), noted[0] if noted else None


__all__ = [
    "Arguments",
    "agreed",
    "as_tuple",
    "bound_arguments",
    "constant_of",
    "every_node",
    "keep_branch",
    "node_count",
    "nodes_of",
    "observed",
    "remove_unread",
    "replace_by_constant",
]

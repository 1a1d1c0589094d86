"""In-place operators written as those that return a new tensor, where the graph shows that nobody else sees the change.

In: an exported program. Out: the same one, edited in place. PyTorch does this for any program (`run_decompositions`), by
tracing all of it anew, which takes longer than the capture did; what is left to it here is what the graph alone does not tell.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from generic_export.compat import COMPOSITE, OpOverload, detect_fake_mode, pytree, schema_of

aten = torch.ops.aten

# A view that can be written through -> the operator that puts a value in its place; both take the same further arguments.
_SCATTERS: dict[OpOverload, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
# Views of the first operand, which only look at the second one.
_LIKE_ANOTHER = frozenset({aten.type_as.default, aten.view_as.default, aten.expand_as.default})
# Operators that PyTorch writes with others, of which it is known that their result is a tensor of its own.
_NEW_TENSORS = frozenset(
    {
        *(aten.linear.default, aten.matmul.default, aten.softmax.int, aten.log_softmax.int, aten.pad.default),
        *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
        *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
        *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
        *(aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default, aten.instance_norm.default),
        *(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.avg_pool1d.default),
        *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
        *(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec),
        *(aten.scaled_dot_product_attention.default, aten.relu6.default, aten.prelu.default, aten.square.default),
    }
)


@dataclass(frozen=True)
class _Write:
    """One in-place operator that can be replaced.

    Attributes:
        node: the operator.
        base: the tensor that is changed; no input, and no part of another one that is read later.
        views: from the operator's own operand outwards to what is a part of `base`; empty where it writes to all of it.
        replacement: the operator that returns what `node` writes.
    """

    node: Node
    base: Node
    views: tuple[Node, ...]
    replacement: OpOverload


def without_writes(program: ExportedProgram) -> None:
    """Replace the in-place operators of a program's graph that can be; the others stay."""
    graph = program.graph
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not _writes(node):
            continue
        if node.target is aten.detach_.default and node.args[0].target is aten.lift_fresh_copy.default:
            _read_constant(graph, node)
            continue
        write = _replaceable(node, places)
        if write is not None:
            _replace(program, write, places)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _read_constant(graph: Graph, node: Node) -> None:
    """Write a constant that a model makes of numbers (`torch.tensor(0.5)`) as a copy, which is what PyTorch's own way makes."""
    copied: Any = node.args[0]
    copied.target = aten.clone.default
    node.replace_all_uses_with(copied)
    graph.erase_node(node)


def _replaceable(node: Node, places: dict[Node, int]) -> _Write | None:
    replacement = _returning(node)
    if replacement is None:
        return None
    views, base = [], node.args[0]
    while isinstance(base, Node) and base.target in _SCATTERS:
        views.append(base)
        base = base.args[0]
    if not isinstance(base, Node):
        return None
    owner = _owner(base)
    if not _is_own(owner) or _seen_elsewhere(owner, (base, *views), node, places):
        return None
    return _Write(node, base, tuple(views), replacement)


def _returning(node: Node) -> OpOverload | None:
    """Return the operator that gives what `node` writes to its first argument, and writes to none."""
    schema = schema_of(node.target)
    written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if written != list(schema.arguments[:1]) or not node.args:
        return None
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_"):
        return None
    overload = getattr(getattr(aten, name[:-1], None), schema.overload_name or "default", None)
    if overload is None or schema_of(overload).is_mutable:
        return None
    # `x += y` keeps the element type of x, `x + y` need not.
    return overload if _result_type(overload, node) == node.meta["val"].dtype else None


def _result_type(overload: OpOverload, node: Node) -> torch.dtype | None:
    args, kwargs = pytree.tree_map_only(Node, lambda one: one.meta.get("val"), (node.args, dict(node.kwargs)))
    with (
        detect_fake_mode([leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]) or nullcontext()
    ):
        try:
            result = overload(*args, **kwargs)
        except Exception:  # whatever a meta kernel refuses: PyTorch's own way will say it better
            return None
    return result.dtype if isinstance(result, torch.Tensor) else None


def _owner(base: Node) -> Node:
    """Return the tensor that one is a view of, as far as single views tell."""
    while isinstance(base.target, OpOverload) and _may_share(base):
        if len(base.all_input_nodes) > 1 and base.target not in _LIKE_ANOTHER:
            break
        base = base.all_input_nodes[0]
    return base


def _is_own(base: Node) -> bool:
    """Say whether a node's tensor is one that its operator made, no input's and no constant's."""
    if base.target is operator.getitem and isinstance(base.args[0], Node):
        return _is_own(base.args[0])
    return base.op == "call_function" and not _may_share(base)


def _may_share(node: Node) -> bool:
    """Say whether a node's result may be (a part of) one of its operands."""
    if not isinstance(node.target, OpOverload):
        return isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)) or node.op != "call_function"
    if node.target in _NEW_TENSORS:
        return False
    if node.target.has_kernel_for_dispatch_key(COMPOSITE):  # its schema need not tell
        return True
    return any(result.alias_info is not None for result in schema_of(node.target).returns)


def _seen_elsewhere(owner: Node, written: Sequence[Node], write: Node, places: dict[Node, int]) -> bool:
    """Say whether anything that shares an owner's memory is read after a write, what is written again apart."""
    place = places[write]
    others = {node for node in _sharing(owner, place, places) if node not in written}
    return any(places[user] > place for node in others for user in node.users)


def _sharing(base: Node, until: int, places: dict[Node, int]) -> Iterator[Node]:
    """Yield `base` and what may share its memory, made before a place."""
    pending, seen = [base], {base}
    while pending:
        node = pending.pop()
        yield node
        for user in node.users:
            if user not in seen and places[user] < until and _may_share(user):
                seen.add(user)
                pending.append(user)


def _replace(program: ExportedProgram, write: _Write, places: dict[Node, int]) -> None:
    graph, node = program.graph, write.node
    with graph.inserting_before(node):
        value = _added(graph, write.replacement, node.args, dict(node.kwargs), node, node)
        made = [value]
        for view in write.views:
            whole = view.args[0]
            value = _added(graph, _SCATTERS[view.target], (whole, value, *view.args[1:]), {}, whole, node)  # type: ignore[index]
            made.append(value)
        _read_instead(program, write.base, value, places, node)
        for view in reversed(write.views):  # a view that is read later is one of what there is then
            value = _added(graph, view.target, (value, *view.args[1:]), dict(view.kwargs), view, view)  # type: ignore[arg-type]
            made.append(value)
            _read_instead(program, view, value, places, node)
    places |= dict.fromkeys(made, places[node])
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _read_instead(program: ExportedProgram, old: Node, new: Node, places: dict[Node, int], write: Node) -> None:
    """Have what reads a tensor after a write read another one."""
    later = [user for user in old.users if places.get(user, -1) > places[write]]
    for user in later:
        user.replace_input_with(old, new)
    if any(user.op == "output" for user in later):
        program.graph_signature.replace_all_uses(old.name, new.name)


def _added(
    graph: Graph, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], like: Any, origin: Node
) -> Node:
    """Add an operator whose result has the shape of `like`'s, and which stands where `origin` did in the user's code."""
    added = graph.call_function(target, tuple(args), kwargs)
    added.meta = {**origin.meta, "val": like.meta["val"]}
    return added


__all__ = ["without_writes"]

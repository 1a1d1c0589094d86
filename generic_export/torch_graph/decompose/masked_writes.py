"""Writes to the places of a mask (`x[mask] *= 2`), whose number depends on values, as a choice between two tensors of full size.

In: an exported program. Out: the same one, edited in place. What is computed of the places alone is computed everywhere, and
`where` takes it in the places of the mask; other uses of them stay, and are refused later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from generic_export.compat import OpOverload, detect_fake_mode, pytree, schema_of
from generic_export.torch_graph.decompose.decomposition import ORIGIN, is_annotation

aten = torch.ops.aten

_CONVERSIONS = frozenset({aten._to_copy.default, aten.to.dtype, aten.clone.default})
# tract stops at a division of integers by zero, which there may be elsewhere.
_DIVISIONS = frozenset({"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"})


def without_masked_writes(program: ExportedProgram) -> None:
    """Replace writes to the places of a mask by `where`, wherever what is written is computed place by place."""
    graph = program.graph
    if not any(node.target is aten.index_put.default for node in graph.nodes):
        return
    whole: dict[Node, Node] = {}  # what a node holds of the places of a mask -> the same everywhere
    masks: dict[Node, Any] = {}
    for node in list(graph.nodes):
        mask = _mask(node)
        if mask is None:
            found = [masks[source] for source in node.all_input_nodes if source in masks]
            if found and _is_place_by_place(node, found, masks):
                masks[node], whole[node] = found[0], _copied(node, lambda source: whole.get(source, source))
        elif node.target is aten.index.Tensor:
            masks[node], whole[node] = _form(mask), node.args[0]  # type: ignore[assignment]
        elif masks.get(node.args[2]) == _form(mask):  # type: ignore[arg-type]
            _choose(node, mask, whole[node.args[2]])  # type: ignore[index]
    _forget(program, masks)


def _mask(node: Node) -> Node | None:
    """Return the mask of a node that reads or writes its places along the first axes of a tensor."""
    if node.target not in (aten.index.Tensor, aten.index_put.default) or len(node.args) != len(
        _POSITIONAL[node.target]
    ):
        return None
    places: Any = node.args[1]
    mask = places[0] if len(places) == 1 else None
    return mask if isinstance(mask, Node) and mask.meta["val"].dtype is torch.bool else None


_POSITIONAL: Mapping[Any, tuple[str, ...]] = {
    aten.index.Tensor: ("self", "indices"),
    aten.index_put.default: ("self", "indices", "values"),  # and none that are added
}


def _form(node: Any) -> Any:
    """Return what a mask is computed by: `~mask`, written twice, is one mask."""
    if isinstance(node, Node) and node.target in (aten.bitwise_not.default, aten.logical_not.default):
        return ("not", _form(node.args[0]))
    return node


def _is_place_by_place(node: Node, found: list[Any], masks: Mapping[Node, Any]) -> bool:
    """Say whether a node computes each place from the same place of tensors of one mask, and from what all places share."""
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if torch.Tag.pointwise not in target.tags and target not in _CONVERSIONS:
        return False
    is_whole_number = not node.meta["val"].dtype.is_floating_point
    if (is_whole_number and schema_of(target).name in _DIVISIONS) or any(each != found[0] for each in found):
        return False
    rank = node.meta["val"].dim()
    return all(
        source in masks or source.meta["val"].dim() < rank
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), torch.Tensor)
    )


def _copied(node: Node, everywhere: Callable[[Node], Node]) -> Node:
    """Return a node that computes everywhere what one computes in the places of a mask."""
    return _inserted(node, node.target, *pytree.tree_map_only(Node, everywhere, (node.args, dict(node.kwargs))))


def _choose(write: Node, mask: Node, value: Node) -> None:
    """Put a choice between what is written and what was there in the place of a write."""
    base: Any = write.args[0]
    while mask.meta["val"].dim() < base.meta["val"].dim():
        mask = _inserted(write, aten.unsqueeze.default, (mask, -1), {})
    chosen = _inserted(write, aten.where.self, (mask, value, base), {})
    write.replace_all_uses_with(chosen)
    write.graph.erase_node(write)


def _inserted(before: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args, kwargs)
    made.meta |= {key: before.meta[key] for key in ORIGIN if key in before.meta}
    given = pytree.tree_map_only(Node, lambda node: node.meta["val"], (args, kwargs))
    with detect_fake_mode(pytree.tree_leaves(given)) or nullcontext():
        made.meta["val"] = target(*given[0], **given[1])
    return made


def _forget(program: ExportedProgram, masks: Mapping[Node, Any]) -> None:
    """Remove what nobody reads any more of the places, with PyTorch's own checks of their number."""
    for node in reversed(list(program.graph.nodes)):
        only_checked = node in masks and all(map(_is_check, node.users))
        if only_checked:
            for user in list(node.users):
                _erase(user)
        if only_checked or (node in masks and not node.users):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _is_check(node: Node) -> bool:
    """Say whether a node is a size, or is made of one, and does nothing but assert something."""
    if isinstance(node.target, OpOverload) and is_annotation(node.target):
        return not node.users
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool) and all(map(_is_check, node.users))


def _erase(node: Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


__all__ = ["without_masked_writes"]

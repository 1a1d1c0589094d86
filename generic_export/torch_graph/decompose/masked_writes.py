"""Writes to the places of a mask (`x[mask] *= 2`), whose number depends on values, as a choice between two tensors of full size.

In: an exported program. Out: the same one, edited in place. What is computed of the places alone is computed everywhere, and
`where` takes it in the places of the mask; other uses of them stay, and are refused later. A tensor with one row per place
(`x[mask] += rows`) is brought into the places first.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_sure

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
    masks: dict[Node, Node] = {}
    for node in list(graph.nodes):
        mask = _mask(node)
        if mask is None:
            of_places = [source for source in node.all_input_nodes if source in masks]
            if of_places and _is_place_by_place(node, of_places, masks):
                masks[node], whole[node] = masks[of_places[0]], _computed_everywhere(node, of_places[0], whole, masks)
        elif node.target is aten.index.Tensor:
            masks[node], whole[node] = mask, node.args[0]  # type: ignore[assignment]
        elif node.args[2] in masks and _form(masks[node.args[2]]) == _form(mask):  # type: ignore[index]
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


def _is_place_by_place(node: Node, of_places: list[Node], masks: Mapping[Node, Node]) -> bool:
    """Say whether a node computes each place from the same place of tensors of one mask, its row, and what all places share."""
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if torch.Tag.pointwise not in target.tags and target not in _CONVERSIONS:
        return False
    if not node.meta["val"].dtype.is_floating_point and schema_of(target).name in _DIVISIONS:
        return False
    if any(_form(masks[source]) != _form(masks[of_places[0]]) for source in of_places):
        return False
    rank = node.meta["val"].dim()
    return rank == of_places[0].meta["val"].dim() and not any(
        _has_rows(source, rank) and not _has_row_shape(source, of_places[0])
        for source in node.all_input_nodes
        if source not in masks
    )


def _has_rows(source: Node, rank: int) -> bool:
    """Say whether a tensor that something of the places is computed with has one row per place."""
    value = source.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == rank and not is_sure(value.shape[0] == 1)


def _has_row_shape(source: Node, place: Node) -> bool:
    rows, places = source.meta["val"], place.meta["val"]
    return all(is_sure(ours == theirs) for ours, theirs in zip(rows.shape[1:], places.shape[1:], strict=True))


def _computed_everywhere(node: Node, place: Node, whole: Mapping[Node, Node], masks: Mapping[Node, Node]) -> Node:
    """Return a node that computes everywhere what one computes in the places of a mask.

    Tensors with one row per place are written into zeros first.
    """

    def everywhere(source: Node) -> Node:
        if source in masks or not _has_rows(source, node.meta["val"].dim()):
            return whole.get(source, source)
        dtype = {"dtype": source.meta["val"].dtype}
        zeros = _inserted(node, aten.zeros_like.default, (whole[place],), dtype)
        return _inserted(node, aten.index_put.default, (zeros, [masks[place]], source), {})

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


def _forget(program: ExportedProgram, masks: Mapping[Node, Node]) -> None:
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

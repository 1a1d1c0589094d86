"""Which module each node of a TorchScript graph belongs to: inlining keeps the names of modules that were called, and no more.

In: a tree of modules and a graph. Out: a dotted path per node. `layers.0.norm` is called `0.norm` there, since nobody calls a
ModuleList: the tensors that a node reads, and the nodes before it, tell which `0` is meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from generic_export.compat import JitBlock, JitGraph, JitNode, JitValue
from generic_export.torchscript.schema import steps_of

# Modules without a forward: no call has their names.
_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})
_Steps = Sequence[tuple[str, str]]


def scoped_paths(root: nn.Module, graph: JitGraph, owner_of: Callable[[JitValue], str | None]) -> dict[int, str]:
    """Return the path of the module that made a value, for the values of a graph, by their numbers.

    Args:
        root: has a module per module of the script, classes named alike.
        graph: the graph, with calls inlined.
        owner_of: gives the path of the module that a value is a tensor of; None for other values.
    """
    found: dict[int, str] = {}
    known: dict[_Steps, list[str]] = {}
    before = ""
    for node in _every_node(graph):
        steps = steps_of(node)
        candidates = known.setdefault(steps, list(_candidates(root, "", steps)) or _shortened(root, steps))
        read = {owner for value in node.inputs() if (owner := owner_of(value)) is not None}
        before = _likeliest(candidates, read, before)
        found |= {value.unique(): before for value in node.outputs()}
    return found


def _every_node(owner: JitGraph | JitBlock) -> Iterator[JitNode]:
    """Yield the nodes that compute something, in order."""
    for node in owner.nodes():
        if node.kind() not in {"prim::Constant", "prim::GetAttr"}:
            yield node
        for block in node.blocks():
            yield from _every_node(block)


def _candidates(module: nn.Module, path: str, steps: _Steps) -> Iterator[str]:
    """Yield the paths that steps may mean: between two steps there may be containers."""
    if not steps:
        yield path
        return
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if (name, type(child).__name__) == steps[0]:
            yield from _candidates(child, inner, steps[1:])
        if type(child).__name__ in _CONTAINERS:
            yield from _candidates(child, inner, steps)


def _shortened(root: nn.Module, steps: _Steps) -> list[str]:
    """Return the candidates of the innermost call that can be found: freezing may leave steps of no module."""
    while steps:
        steps = steps[:-1]
        candidates = list(_candidates(root, "", steps))
        if candidates:
            return candidates
    return [""]


def _likeliest(candidates: Sequence[str], read: set[str], before: str) -> str:
    """Return the candidate whose tensors are read, else the one nearest to the module of the node before."""
    if len(candidates) == 1:
        return candidates[0]
    owning = [candidate for candidate in candidates if any(_is_within(owner, candidate) for owner in read)]
    near = owning or candidates
    return max(near, key=lambda candidate: _shared_steps(candidate, before))


def _shared_steps(left: str, right: str) -> int:
    pairs = zip(left.split("."), right.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


__all__ = ["scoped_paths"]

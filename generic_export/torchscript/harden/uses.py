"""Where a number of a TorchScript graph ends up: in decisions alone, or in the shape of a tensor.

In: a value. Out: whether all its uses, through arithmetic, lists, branches and loops, are control flow; or what it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generic_export.compat import JitBlock, JitGraph, JitNode, JitValue

SIZE_CALLS = ("aten::dim", "aten::size", "aten::len", "aten::numel")

_MESSAGES = frozenset({"prim::RaiseException", "prim::Print", "aten::warn"})
_PLAIN_KINDS = frozenset({"IntType", "FloatType", "BoolType", "StringType", "NumberType", "NoneType"})


def decides_only(value: JitValue, owners: dict[int, JitNode]) -> bool:
    """Say whether a value is read for branches, trip counts and messages only.

    Args:
        value: a number or a list of numbers.
        owners: see `owners_of_returns`.
    """
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current.unique() in seen:
            continue
        seen.add(current.unique())
        for use in current.uses():
            onwards = _onwards(use.user, use.offset, owners)
            if onwards is None:
                return False
            pending.extend(onwards)
    return True


def owners_of_returns(owner: JitGraph | JitBlock) -> dict[int, JitNode]:
    """Map, by number, each result of a block to the `if` or loop that the block belongs to."""
    found: dict[int, JitNode] = {}
    for node in owner.nodes():
        for block in node.blocks():
            found |= {value.unique(): node for value in block.outputs()}
            found |= owners_of_returns(block)
    return found


def _onwards(user: JitNode, offset: int, owners: dict[int, JitNode]) -> list[JitValue] | None:
    """Return the values that carry a used one on; None when it leaves the world of numbers."""
    kind = user.kind()
    if kind == "prim::If" or kind in _MESSAGES:
        return []
    if kind == "prim::Loop":
        return [] if offset < 2 else _carried(user, offset - 2)
    if kind == "prim::Return":
        return _returned(user, offset, owners)
    outputs = list(user.outputs())
    return outputs if outputs and all(_is_plain(output.type()) for output in outputs) else None


def _carried(loop: JitNode, index: int) -> list[JitValue]:
    body = next(iter(loop.blocks()))
    return [list(body.inputs())[index + 1], list(loop.outputs())[index]]


def _returned(returning: JitNode, offset: int, owners: dict[int, JitNode]) -> list[JitValue] | None:
    owner = owners.get(list(returning.inputs())[offset].unique())
    if owner is None:
        return None  # a result of the graph
    if owner.kind() == "prim::If":
        return [list(owner.outputs())[offset]]
    return [] if offset == 0 else _carried(owner, offset - 1)


def _is_plain(kind: Any) -> bool:
    name = kind.kind()
    if name in {"ListType", "OptionalType", "TupleType"}:
        return all(_is_plain(inner) for inner in kind.containedTypes())
    return name in _PLAIN_KINDS


def depends_on_sizes(value: JitValue) -> bool:
    """Say whether a number is computed from the size of a tensor (not from its rank)."""
    return any(node.kind() in SIZE_CALLS and node.kind() != "aten::dim" for node in _computed_by(value))


def depends_on_inputs(value: JitValue) -> bool:
    """Say whether a number may differ between inputs of one rank and type: it reads sizes, data, or the module's state."""
    for node in _computed_by(value):
        if node.kind() == "prim::GetAttr":
            return True
        reads_tensor = any(given.type().kind() == "TensorType" for given in node.inputs())
        if reads_tensor and not any(True for _ in node.blocks()) and node.kind().partition("::")[2] not in _FIXED:
            return True
    return False


# What a tensor says of itself that is the same for every input that a graph takes.
_FIXED = frozenset(
    {"dim", "ndim", "dtype", "device", "get_device", "layout", "itemsize", "requires_grad", "__is__", "__isnot__"}
    | {
        f"is_{what}"
        for what in ("floating_point", "complex", "contiguous", "quantized", "sparse", "nested", "inference")
    }
    | {f"is_{device}" for device in ("cpu", "cuda", "meta", "mps", "xpu", "vulkan", "mkldnn")}
    | {"ListConstruct", "TupleConstruct", "DictConstruct", "TupleUnpack", "TupleIndex"}
)


def _computed_by(value: JitValue) -> Iterator[JitNode]:
    """Yield the nodes that a number is computed by, through numbers and lists, up to those that read tensors."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current.unique() not in seen:
            seen.add(current.unique())
            yield current.node()
            pending.extend(_sources(current.node()))


def _sources(node: JitNode) -> Iterator[JitValue]:
    """Yield what a node computes from; a tensor's values do not depend on sizes in this sense."""
    candidates = [*node.inputs(), *(value for block in node.blocks() for value in block.outputs())]
    yield from (value for value in candidates if value.type().kind() != "TensorType")


__all__ = ["SIZE_CALLS", "decides_only", "depends_on_inputs", "depends_on_sizes", "owners_of_returns"]

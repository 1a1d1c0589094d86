"""Arguments and results of a call as named leaves, and how the same nest is put together from other tensors.

In: any nest of containers, dataclasses, states and constants. Out: `Layout`: a dotted name per tensor, and `rebuilt`.
Unlike `torch_graph.nested` it keeps states (caches) as such, because a call writes to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from generic_export.debug.record.state import StateAdapter, adapter_of, require_known
from generic_export.debug.records import Leaf, LeafKind

# The containers that PyTorch's captures know are the ones a diagnosis knows.
from generic_export.torch_graph.nested import _parts as container_parts
from generic_export.torch_graph.nested import signature_of_function

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range, type)

Lookup = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class _Tensor:
    name: str


@dataclass(frozen=True)
class _Constant:
    value: Any


@dataclass(frozen=True)
class _State:
    ident: int
    name: str
    names: tuple[tuple[str, str], ...]  # (name of the leaf, name in the adapter)
    template: Any
    adapter: StateAdapter


@dataclass(frozen=True)
class _Container:
    children: tuple[Any, ...]
    together: Callable[[list[Any]], Any]


@dataclass
class Layout:
    """A nest taken apart.

    Attributes:
        root: what the nest is made of.
        leaves: every leaf in order; a tensor that stands in several places is a leaf once, then `alias_of` it.
        tensors: the tensors themselves, by leaf name; emptied once they are stored elsewhere.
        unknown: names of objects that hold tensors and have no adapter, with the objects.
    """

    root: Any
    leaves: tuple[Leaf, ...] = ()
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)

    def rebuilt(self, lookup: Lookup) -> Any:
        """Return the nest with other tensors in the places of its own; states are new objects."""
        return _rebuilt(self.root, lookup, {})

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor leaf with its tensor, one that stands in several places under each name."""
        tensors = [leaf for leaf in self.leaves if leaf.kind is LeafKind.TENSOR]
        return {leaf.name: self.tensors[leaf.alias_of or leaf.name] for leaf in tensors}

    def release(self, kept: Mapping[str, torch.Tensor | None]) -> None:
        """Let go of the original tensors; the templates of states hold the kept copies instead."""
        self.tensors = {}
        for state in _states(self.root):
            tensors = {inner: kept.get(name) for name, inner in state.names}
            if tensors:
                filled = {inner: torch.empty(0) if t is None else t for inner, t in tensors.items()}
                state.adapter.assign(state.template, filled)

    def require_known(self) -> None:
        """Refuse objects that hold tensors and have no adapter.

        Raises:
            UnknownStateError: there is one.
        """
        for name, value in self.unknown.items():
            require_known(value, name)


def _states(node: Any) -> Iterator[_State]:
    if isinstance(node, _State):
        yield node
    for child in node.children if isinstance(node, _Container) else ():
        yield from _states(child)


def adapters_in(layout: Layout) -> list[StateAdapter]:
    """Return the adapters of the states in a layout."""
    return [state.adapter for state in _states(layout.root)]


def state_names(layout: Layout) -> tuple[str, ...]:
    """Return the names of the states in a layout; their leaves are called `<name>.<slot>`."""
    return tuple(dict.fromkeys(state.name for state in _states(layout.root)))


def belongs(leaf: str, states: Sequence[str]) -> bool:
    """Say whether a leaf is a slot of one of some states."""
    return any(leaf.startswith(f"{name}.") for name in states)


def _rebuilt(node: Any, lookup: Lookup, states: dict[int, Any]) -> Any:
    if isinstance(node, _Tensor):
        return lookup(node.name)
    if isinstance(node, _Constant):
        return node.value
    if isinstance(node, _State):
        if node.ident not in states:
            states[node.ident] = node.adapter.copy(node.template)
            if node.names:
                node.adapter.assign(states[node.ident], {inner: lookup(name) for name, inner in node.names})
        return states[node.ident]
    return node.together([_rebuilt(child, lookup, states) for child in node.children])


def take_apart(named: Sequence[tuple[str, Any]], *, keep_states: bool) -> tuple[list[Any], Layout]:
    """Take several named values apart together.

    Args:
        named: names and values.
        keep_states: copy each state, as the template of what `rebuilt` makes; False for a quick look.

    Returns:
        A node per value, and the layout of all of them (whose root is not set).
    """
    layout = Layout(None)
    walk = _Walk(layout, keep_states)
    nodes = [walk.node(value, name) for name, value in named]
    layout.leaves = tuple(walk.leaves)
    return nodes, layout


class _Walk:
    """One pass over a nest; used once."""

    def __init__(self, layout: Layout, keep_states: bool) -> None:
        self.layout = layout
        self.keep_states = keep_states
        self.leaves: list[Leaf] = []
        self.names: dict[int, str] = {}
        self.states: dict[int, _State] = {}

    def node(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return _Tensor(self.tensor(value, name))
        if value is None:
            self.leaves.append(Leaf(name, LeafKind.NONE))
            return _Constant(None)
        if isinstance(value, _CONSTANTS) and not hasattr(value, "_fields"):
            self.leaves.append(Leaf(name, LeafKind.CONSTANT, value=_text(value)))
            return _Constant(value)
        adapter = adapter_of(value)
        if adapter is not None:
            return self.state(value, name, adapter)
        parts = container_parts(value)
        if parts is None:
            self.leaves.append(Leaf(name, LeafKind.OPAQUE, value=type(value).__name__))
            self.layout.unknown[name] = value
            return _Constant(value)
        children, together = parts
        return _Container(
            tuple(self.node(child, f"{name}.{key}" if name else str(key)) for key, child in children), together
        )

    def tensor(self, value: torch.Tensor, name: str) -> str:
        first = self.names.get(id(value))
        # While a piece is captured sizes are symbols, which nobody may ask for their numbers.
        sizes = tuple(value.shape) if all(type(size) is int for size in value.shape) else ()
        dtype = str(value.dtype).removeprefix("torch.")
        self.leaves.append(Leaf(name, LeafKind.TENSOR, dtype, sizes, alias_of=first or ""))
        if first is not None:
            return first
        self.names[id(value)] = name
        self.layout.tensors[name] = value
        return name

    def state(self, value: Any, name: str, adapter: StateAdapter) -> _State:
        known = self.states.get(id(value))
        if known is None:
            found = [(f"{name}.{inner}", inner, tensor) for inner, tensor in adapter.flatten(value).items()]
            names = tuple((self.tensor(tensor, leaf), inner) for leaf, inner, tensor in found)
            template = adapter.copy(value) if self.keep_states else value
            known = self.states[id(value)] = _State(id(value), name, names, template, adapter)
        return known


def _text(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


# --- calls ----------------------------------------------------------------------------------------


def named_arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the arguments with their names: the parameter's, `rest.0` in `*rest`, or `arg_0` where nothing is known."""
    parameters = _parameters(forward)
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    names = [*plain[: len(args)], *(f"{rest}.{index}" for index in range(len(args) - len(plain)))]
    return [*zip(names, args, strict=True), *kwargs.items()]


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(signature_of_function(forward).parameters.values())
    except (TypeError, ValueError):  # a forward made in C
        return []


def tensors_in(named: Sequence[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Return every tensor in named values, states looked into, one that stands in several places under each name."""
    return take_apart(named, keep_states=False)[1].named_tensors()


def write_into(named: Sequence[tuple[str, Any]], leaf: str, value: torch.Tensor) -> None:
    """Do to an argument what a call did: a tensor is overwritten, a state gets the new tensor in its slot."""
    nodes, layout = take_apart(named, keep_states=False)
    for state in (found for node in nodes for found in _states(node)):
        if leaf.startswith(f"{state.name}."):
            state.adapter.assign(state.template, {leaf.removeprefix(f"{state.name}."): value})
            return
    layout.tensors[leaf].copy_(value)


def call_layout(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, keep_states: bool = True
) -> Layout:
    """Take the arguments of a call apart; `rebuilt` gives `(args, kwargs)`.

    Leaves are in the order of the signature whichever way they were passed, and bear its names: two calls that say the same
    have the same leaves. Parameters left out have their defaults as leaves.
    """
    named = named_arguments(forward, args, kwargs)
    nodes, layout = take_apart(named, keep_states=keep_states)
    count = len(args)
    keywords = list(kwargs)

    def together(items: list[Any]) -> Any:
        return tuple(items[:count]), dict(zip(keywords, items[count:], strict=True))

    layout.root = _Container(tuple(nodes), together)
    layout.leaves = _in_signature_order(forward, layout.leaves, {name for name, _ in named})
    return layout


def _in_signature_order(forward: Callable[..., Any], leaves: tuple[Leaf, ...], given: set[str]) -> tuple[Leaf, ...]:
    parameters = _parameters(forward)
    order = {parameter.name: index for index, parameter in enumerate(parameters)}
    defaults = tuple(
        _default_leaf(p.name, p.default)
        for p in parameters
        if p.name not in given and p.default is not p.empty and not isinstance(p.default, torch.Tensor)
    )
    return tuple(sorted((*leaves, *defaults), key=lambda leaf: order.get(leaf.name.split(".")[0], len(order))))


def _default_leaf(name: str, value: Any) -> Leaf:
    if value is None:
        return Leaf(name, LeafKind.NONE)
    return Leaf(name, LeafKind.CONSTANT if isinstance(value, _CONSTANTS) else LeafKind.OPAQUE, value=_text(value))


def result_layout(result: Any) -> Layout:
    """Take a result apart: `output`, `output_0`, or the names that dicts and dataclasses have."""
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        kind = type(result)
        nodes, layout = take_apart([(f"output_{i}", item) for i, item in enumerate(result)], keep_states=True)
        layout.root = _Container(tuple(nodes), lambda items: kind(items))
        return layout
    is_container = adapter_of(result) is None and container_parts(result) is not None
    name = "" if is_container and not isinstance(result, torch.Tensor) else "output"
    nodes, layout = take_apart([(name, result)], keep_states=True)
    layout.root = nodes[0]
    return layout


def with_blank_slots(layout: Layout, after: Mapping[str, torch.Tensor]) -> Layout:
    """Return a layout whose states also have the slots that were empty, as tensors of length 0.

    Args:
        layout: of the arguments before a call.
        after: tensors that states have since, by leaf name.
    """
    blanks: dict[str, torch.Tensor] = {}

    def filled(node: Any) -> Any:
        if isinstance(node, _State):
            names = list(node.names)
            for leaf, tensor in after.items():
                inner = leaf.removeprefix(f"{node.name}.")
                blank = node.adapter.blank(inner, tensor) if leaf.startswith(f"{node.name}.") else None
                if blank is not None:
                    blanks[leaf] = blank
                    names.append((leaf, inner))
            return replace(node, names=tuple(names))
        if isinstance(node, _Container):
            return replace(node, children=tuple(filled(child) for child in node.children))
        return node

    leaves = [*layout.leaves]
    root = filled(layout.root)
    for name, blank in blanks.items():
        dtype = str(blank.dtype).removeprefix("torch.")
        leaves.append(Leaf(name, LeafKind.TENSOR, dtype, tuple(blank.shape)))
    return Layout(root, tuple(leaves), blanks, layout.unknown)


__all__ = [
    "Layout",
    "Lookup",
    "adapters_in",
    "belongs",
    "call_layout",
    "named_arguments",
    "result_layout",
    "state_names",
    "take_apart",
    "tensors_in",
    "with_blank_slots",
    "write_into",
]

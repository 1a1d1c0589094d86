"""Calls that look alike, gathered: 32 equal layers are one piece, tried once.

In: a recording. Out: `Case`s: a `Piece` with the module and the recorded calls that stand for it, in execution order.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from generic_export.debug.record.axes import Form, Overrides, Symbols, axis_form
from generic_export.debug.record.leaves import belongs, state_names
from generic_export.debug.record.recording import RecordedCall, Recording
from generic_export.debug.records import Leaf, LeafKind, Piece

# Attributes that say where a module stands, not what it is.
_POSITION = re.compile(r"(^|_)(idx|index|layer_id|block_id|layer_number|position)$")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Case:
    """A piece with what is needed to try it.

    Attributes:
        piece: the record.
        module: the member that stands for all.
        calls: its recorded calls, one or more per input set.
        forms: sizes of each input tensor, in symbols, by leaf name.
        output_forms: the same of each tensor that a graph gives back; a written input is called `out_<leaf>`.
        symbols: sizes of the symbols in each input set.
        inner: calls of its direct children within each of `calls`, by the index of the call.
    """

    piece: Piece
    module: nn.Module
    calls: tuple[RecordedCall, ...]
    forms: Mapping[str, tuple[Form, ...]]
    output_forms: Mapping[str, tuple[Form, ...]]
    symbols: Symbols
    inner: Mapping[int, tuple[RecordedCall, ...]]


def cases_of(
    recording: Recording,
    symbols: Symbols,
    overrides: Overrides | None = None,
    *,
    every_member: bool = False,
) -> list[Case]:
    """Gather the calls of a recording.

    Args:
        recording: the recording.
        symbols: fitted to its roots; sizes that need further ones add them.
        overrides: symbols of axes of the root's inputs.
        every_member: do not gather equal modules: each is a piece of its own (their weights differ).
    """
    key_of = kinds_of_calls(recording, every_member=every_member)
    groups: dict[str, list[RecordedCall]] = {}
    for recorded in recording.calls:
        groups.setdefault(key_of[recorded.call.index], []).append(recorded)
    depths = _depths(recording)
    cases = [_case(key, group, recording, key_of, depths, symbols, overrides or {}) for key, group in groups.items()]
    return sorted(cases, key=lambda case: case.piece.order)


def _case(
    key: str,
    group: Sequence[RecordedCall],
    recording: Recording,
    key_of: Mapping[int, str],
    depths: Mapping[int, int],
    symbols: Symbols,
    overrides: Overrides,
) -> Case:
    first = group[0]
    own = [recorded for recorded in group if recorded.module is first.module and recorded.call.path == first.call.path]
    example = max(own, key=_usefulness)
    calls = (example, *(recorded for recorded in own if recorded is not example))
    same_turn = [recorded for recorded in own if recorded.call.turn == example.call.turn]
    is_root = first.call.parent is None and first.module is recording.model
    forms = _forms([(r, list(_input_shapes(r))) for r in same_turn], symbols, overrides if is_root else {})
    output_forms = _forms([(r, list(r.result_shapes())) for r in same_turn], symbols, {})
    children = [r for r in recording.calls if r.call.parent is not None and key_of.get(r.call.parent) == key]
    parents = [key_of[r.call.parent] for r in group if r.call.parent is not None]
    inner = {
        recorded.call.index: tuple(r for r in recording.calls if r.call.parent == recorded.call.index)
        for recorded in own
    }
    module = first.module
    piece = Piece(
        key=key,
        class_name=first.call.class_name,
        qualified_name=_qualified_name(first),
        path=first.call.path,
        paths=_paths(group, recording),
        depth=depths[first.call.index],
        source=first.call.source,
        inputs=_named(example.call.inputs, forms),
        outputs=_named(example.call.outputs, output_forms),
        attributes=tuple(_attributes(module)) if ":" not in first.call.path else (),
        parameters=tuple(_parameters(module)) if ":" not in first.call.path else (),
        tied=_tied(module),
        parameter_count=_parameter_count(first),
        sets=tuple(sorted({recorded.call.set_index for recorded in own})),
        calls=len(group),
        parents=_unique(parent for parent in parents if parent != key),
        children=_unique(key_of[child.call.index] for child in children if key_of[child.call.index] != key),
        order=first.call.index,
        notes=tuple(_notes(group)),
    )
    return Case(piece, module, calls, forms, output_forms, symbols, inner)


def with_children(case: Case, recording: Recording, modules: Collection[nn.Module]) -> Case:
    """Return a case whose inner calls are the outermost ones of some modules, however deep these are."""

    def nearest(index: int) -> Iterator[RecordedCall]:
        for recorded in recording.calls:
            if recorded.call.parent == index and recorded.module in modules and not _function(recorded):
                yield recorded
            elif recorded.call.parent == index:
                yield from nearest(recorded.call.index)

    return replace(case, inner={index: tuple(nearest(index)) for index in case.inner})


def _usefulness(recorded: RecordedCall) -> tuple[int, int]:
    """Say how good a call is as the example: no axis of 0 or 1, many inputs that are there."""
    tensors = [leaf for leaf in recorded.call.inputs if leaf.kind is LeafKind.TENSOR]
    small = sum(1 for leaf in tensors for size in leaf.sizes if size < 2)
    return -sum(1 for leaf in tensors for size in leaf.sizes if size == 0), -small


def _unique(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(keys))


def _paths(group: Sequence[RecordedCall], recording: Recording) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for recorded in group:
        found[recorded.call.path] = None
        if ":" not in recorded.call.path:
            found.update(dict.fromkeys(recording.paths.get(recorded.module, ())))
    return tuple(found)


def _depths(recording: Recording) -> dict[int, int]:
    depths: dict[int, int] = {}
    for recorded in recording.calls:
        parent = recorded.call.parent
        depths[recorded.call.index] = 0 if parent is None else depths[parent] + 1
    return depths


def _parameter_count(recorded: RecordedCall) -> int:
    if ":" in recorded.call.path:
        return 0
    return sum(tensor.numel() for tensor in (*recorded.module.parameters(), *recorded.module.buffers()))


def _parameters(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        yield f"{name}: {dtype}[{', '.join(map(str, parameter.shape))}]"


def _tied(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _notes(group: Sequence[RecordedCall]) -> Iterator[str]:
    first = group[0]
    states = state_names(first.arguments)
    written = [leaf.name for leaf in first.call.inputs if leaf.written and not belongs(leaf.name, states)]
    if written:
        yield f"writes to its input {', '.join(written)}: exported as an output"
    same = [(leaf.name, leaf.alias_of) for leaf in first.call.outputs if leaf.alias_of]
    for name, source in same:
        yield f"output {name} is input {source} unchanged"
    values: dict[str, set[str]] = {}
    for recorded in group:
        for leaf in recorded.call.outputs:
            if leaf.kind is LeafKind.CONSTANT:
                values.setdefault(leaf.name, set()).add(leaf.value)
    for name, found in values.items():
        if len(found) > 1:
            yield f"output {name} is no tensor and differs between calls ({', '.join(sorted(found))}): no archive has it"


# --- sizes ------------------------------------------------------------------------------------------


def _forms(
    calls: Sequence[tuple[RecordedCall, Sequence[tuple[str, tuple[int, ...]]]]], symbols: Symbols, overrides: Overrides
) -> dict[str, tuple[Form, ...]]:
    sizes: dict[str, list[list[tuple[int, int]]]] = {}
    for recorded, shapes in calls:
        for name, shape in shapes:
            axes = sizes.setdefault(name, [[] for _ in shape])
            for axis, size in zip(axes, shape, strict=True):
                axis.append((recorded.call.set_index, size))
    return {
        name: tuple(
            axis_form(symbols, name, number, axis, overrides) or symbols.named(axis, number)
            for number, axis in enumerate(axes)
        )
        for name, axes in sizes.items()
    }


def _input_shapes(recorded: RecordedCall) -> Iterator[tuple[str, tuple[int, ...]]]:
    for leaf in recorded.call.inputs:
        if leaf.kind is LeafKind.TENSOR and not leaf.alias_of:
            yield leaf.name, leaf.sizes


def _named(leaves: Sequence[Leaf], forms: Mapping[str, tuple[Form, ...]]) -> tuple[Leaf, ...]:
    return tuple(
        replace(leaf, axes=tuple(map(str, forms[leaf.name]))) if leaf.name in forms else leaf for leaf in leaves
    )


# --- what makes two calls alike ---------------------------------------------------------------------


def kinds_of_calls(recording: Recording, *, every_member: bool = False) -> dict[int, str]:
    """Return, for each call of a recording, a key that calls share which look alike; see `cases_of`."""
    texts: dict[tuple[int, str], str] = {}
    keys: dict[int, str] = {}
    for recorded in recording.calls:
        function = _function(recorded)
        known = (id(recorded.module), function)
        if known not in texts:
            texts[known] = f"function {function}" if function else _module_text(recorded.module)
        parts = [texts[known], _signature(recorded), *([recorded.call.path] if every_member else [])]
        keys[recorded.call.index] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return keys


def _function(recorded: RecordedCall) -> str:
    """Return the name of a free function, "" for a module."""
    return recorded.call.path.partition(":")[2]


def _qualified_name(recorded: RecordedCall) -> str:
    kind = type(recorded.module)
    return f"{kind.__module__}.{_function(recorded) or kind.__qualname__}"


def _signature(recorded: RecordedCall) -> str:
    prefixes = state_names(recorded.arguments)
    plain = [_leaf_text(leaf) for leaf in recorded.call.inputs if not belongs(leaf.name, prefixes)]
    plain += [f"{_numberless(name)} is a state" for name in prefixes]
    # Of a state only what the call writes to counts: layer 3 gets the same cache as layer 0.
    written = [name for name in recorded.after if belongs(name, prefixes)]
    slots = Counter(f"{_numberless(name)}{'' if name in recorded.held else ' (new)'}" for name in written)
    results = [_result_text(leaf) for leaf in recorded.call.outputs if leaf.name not in written]
    return "\n".join([*plain, *(f"{name} x {count}" for name, count in sorted(slots.items())), "->", *results])


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _leaf_text(leaf: Leaf) -> str:
    if leaf.kind is LeafKind.TENSOR:
        return f"{leaf.name}: {leaf.dtype} rank {len(leaf.sizes)}{' written' if leaf.written else ''}"
    return f"{leaf.name}: {leaf.kind}" if leaf.kind is LeafKind.NONE else f"{leaf.name} = {leaf.value}"


def _result_text(leaf: Leaf) -> str:
    # A number that is returned may tell a size: it does not make another piece.
    return f"{leaf.name}: {leaf.kind}" if leaf.kind is LeafKind.CONSTANT else _leaf_text(leaf)


def _module_text(module: nn.Module) -> str:
    lines = []
    for path, inner in module.named_modules():
        lines.append(f"{path} {type(inner).__module__}.{type(inner).__qualname__}")
        lines.extend(f"{name}={value}" for name, value in _attributes(inner))
        for name, tensor in (*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)):
            lines.append(f"{path}.{name} {tensor.dtype} {tuple(tensor.shape)}")
    return "\n".join(lines)


def _attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training" or _POSITION.search(name):
            continue
        if isinstance(value, _PLAIN) or _is_plain_list(value):
            yield name, str(value)
        elif inspect.isfunction(value) or inspect.isbuiltin(value):
            yield name, getattr(value, "__qualname__", repr(value))


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= 16 and all(isinstance(item, _PLAIN) for item in value)


def class_lines(module: nn.Module) -> tuple[str, int, int] | None:
    """Return file name, first line and the line after the last of a module's class (or function); None for one made in C."""
    subject = getattr(module, "function", None) or type(module)
    try:
        lines, first = inspect.getsourcelines(subject)
        return os.path.basename(inspect.getfile(subject)), first, first + len(lines)
    except (OSError, TypeError):
        return None


def class_sources(module: nn.Module) -> str:
    """Return a hash of the source of every class inside a module: another one when its code was changed."""
    kinds = {type(inner) for inner in module.modules()}
    texts = sorted(_source_text(kind) for kind in kinds)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _source_text(kind: type | Callable[..., Any]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return getattr(kind, "__qualname__", repr(kind))


__all__ = ["Case", "cases_of", "class_lines", "class_sources", "kinds_of_calls", "with_children"]

"""Modules of a list whose operations are the same but for names: layers of a stack, found in a finished document.

In: a document whose operations say which module they come from. Out: kinds of such modules, with what each of them reads
and makes, in one order for all of a kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from generic_export.nnef.cutting import EXTERNAL
from generic_export.nnef.graph import (
    Argument,
    ArrayLiteral,
    NnefGraph,
    NnefOperation,
    Reference,
    TupleLiteral,
    references,
)

STORED = "variable"

_FEWEST_OPERATIONS = 5
_NAMES = "name"  # the one attribute whose text names something of one layer: a cache that the engine keeps


@dataclass(frozen=True)
class Repetition:
    """One of several modules that do the same.

    Attributes:
        path: of the module.
        operations: its own, in order; tensors that it reads are not among them.
        outer: identifiers that it reads and does not make, in order of first use.
        inner: identifiers that it makes, in order.
        literals: numbers, and names of states, in order of use; another of its kind may have others.
        results: positions in `inner` of what is read elsewhere.
    """

    path: str
    operations: tuple[NnefOperation, ...]
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    literals: tuple[str | float, ...]
    results: tuple[int, ...]


Kind = tuple[Repetition, ...]
"""Modules of one list that do the same, two at least, in the order of the list."""


def repeated_blocks(graph: NnefGraph) -> tuple[Kind, ...]:
    """Return the modules that are repeated, outer ones before what repeats inside of others; none is part of another."""
    document = _Document(graph)
    kinds: list[Kind] = []
    within: set[str] = set()  # paths of modules that belong to a kind
    depth = 0
    while lists := _lists(graph.operations, depth, within):
        for paths in lists.values():
            found = _kinds([document.repetition(path) for path in sorted(paths, key=number_of)])
            kinds += found
            within.update(each.path for kind in found for each in kind)
        depth += 1
    return tuple(kinds)


def is_hole(value: Argument, attribute: str) -> bool:
    """Say whether a literal may differ between modules of a kind."""
    return isinstance(value, float) or (attribute == _NAMES and isinstance(value, str))


def list_of(path: str) -> str:
    """Return the path of the list that a module is in: `model.layers` of `model.layers.3`."""
    return path.rpartition(".")[0]


def number_of(path: str) -> int:
    """Return the place of a module in its list: 3 of `model.layers.3`."""
    return int(path.rpartition(".")[2])


def _lists(operations: Sequence[NnefOperation], depth: int, within: set[str]) -> dict[str, set[str]]:
    """Return, by path of a list, its modules; `depth` counts the lists around it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in {operation.block.path for operation in operations}:
        ends = [match.end() for match in re.finditer(r"(?<![^.])\d+(?![^.])", path)]
        if len(ends) > depth and not within.intersection(path[:end] for end in ends[:depth]):
            found[list_of(path[: ends[depth]])].add(path[: ends[depth]])
    return dict(found)


def _kinds(candidates: Iterable[Repetition | None]) -> list[Kind]:
    alike: defaultdict[object, list[Repetition]] = defaultdict(list)
    for each in candidates:
        if each is not None and len(each.operations) >= _FEWEST_OPERATIONS:
            alike[_signature(each)].append(each)
    return [tuple(kind) for kind in alike.values() if len(kind) > 1]


class _Document:
    """A document with what is asked of it again and again."""

    def __init__(self, graph: NnefGraph) -> None:
        self._operations = graph.operations
        self._outputs = set(graph.outputs)
        self._readers: defaultdict[str, list[int]] = defaultdict(list)
        self._given: set[str] = set()  # what depends on an input
        self._stored: set[str] = set()
        for place, operation in enumerate(graph.operations):
            reads = references(operation)
            for name in reads:
                self._readers[name].append(place)
            if operation.operator == EXTERNAL or not self._given.isdisjoint(reads):
                self._given.update(operation.outputs)
            if operation.operator == STORED:
                self._stored.update(operation.outputs)

    def repetition(self, path: str) -> Repetition | None:
        """Return what a module does; None where something outside is computed between its steps."""
        places = [
            place
            for place, each in enumerate(self._operations)
            if (each.block.path == path or each.block.path.startswith(f"{path}."))
            and each.operator not in (STORED, EXTERNAL)
        ]
        shared = self._shared(places)
        places = [place for place in places if place not in shared]
        if not places or self._interrupted(places):
            return None
        within = set(places)
        operations = tuple(self._operations[place] for place in places)
        inner = tuple(name for each in operations for name in each.outputs)
        own = set(inner)
        outer = tuple(dict.fromkeys(name for each in operations for name in references(each) if name not in own))
        literals = tuple(value for each in operations for value in _holes(each))
        results = tuple(index for index, name in enumerate(inner) if self._is_read_outside(name, within))
        return Repetition(path, operations, outer, inner, literals, results)

    def _is_read_outside(self, name: str, places: set[int]) -> bool:
        return name in self._outputs or not places.issuperset(self._readers[name])

    def _shared(self, places: Sequence[int]) -> set[int]:
        """Return the operations that stand in a module because it is the first to need them: masks, angles.

        They are read outside, and need no weight of this module, or no input of the graph.
        """
        own, weighted = set(places), set(self._stored)
        for place in places:
            if not weighted.isdisjoint(references(self._operations[place])):
                weighted.update(self._operations[place].outputs)
        maker = {name: place for place in places for name in self._operations[place].outputs}
        pending = [
            place
            for place in places
            if any(
                self._is_read_outside(name, own) and not (name in weighted and name in self._given)
                for name in self._operations[place].outputs
            )
        ]
        found: set[int] = set()
        while pending:
            place = pending.pop()
            if place not in found:
                found.add(place)
                pending += [maker[name] for name in references(self._operations[place]) if name in maker]
        return found

    def _interrupted(self, places: Sequence[int]) -> bool:
        """Say whether operations of others depend on some of these and are needed by later ones."""
        own = set(places)
        made: set[str] = set()
        outside: set[str] = set()
        for place in range(places[0], places[-1] + 1):
            reads, outputs = references(self._operations[place]), self._operations[place].outputs
            if place in own:
                if not outside.isdisjoint(reads):
                    return True
                made.update(outputs)
            elif not (made.isdisjoint(reads) and outside.isdisjoint(reads)):
                outside.update(outputs)
        return False


def _form(value: Argument, numbers: Mapping[str, int]) -> object:
    """Return an argument with a number for each identifier."""
    if isinstance(value, Reference):
        return "value", numbers[value.name]
    if isinstance(value, (ArrayLiteral, TupleLiteral)):
        return type(value).__name__, tuple(_form(element, numbers) for element in value.elements)
    return type(value).__name__, value


def _signature(block: Repetition) -> object:
    """Return what two modules share exactly when they do the same."""
    numbers = {name: index for index, name in enumerate((*block.inner, *block.outer))}

    def form(value: Argument, attribute: str = "") -> object:
        return type(value).__name__ if is_hole(value, attribute) else _form(value, numbers)

    steps = tuple(
        (
            each.operator,
            each.generic_type,
            each.note,
            each.block.path[len(block.path) :],
            each.block.module_type,
            len(each.outputs),
            tuple(form(value) for value in each.inputs),
            tuple((name, form(value, name)) for name, value in each.attributes),
        )
        for each in block.operations
    )
    return steps, block.results


def _holes(operation: NnefOperation) -> Iterator[str | float]:
    for name, value in (*(("", value) for value in operation.inputs), *operation.attributes):
        if is_hole(value, name) and isinstance(value, (str, float)):
            yield value

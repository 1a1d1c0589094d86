"""What every pass over a finished document needs: attributes read and replaced, references renamed, names that are free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation, Reference, TupleLiteral


def attribute(operation: NnefOperation, name: str) -> Argument | None:
    """Return a named argument; None when it is not given."""
    return dict(operation.attributes).get(name)


def with_attribute(operation: NnefOperation, name: str, value: Argument) -> NnefOperation:
    """Return the operation with another value of an argument that it has."""
    return replace(
        operation, attributes=tuple((key, value if key == name else old) for key, old in operation.attributes)
    )


def renamed(operation: NnefOperation, names: Mapping[str, str]) -> NnefOperation:
    """Return the operation reading values under other names; attributes are left alone."""
    return replace(operation, inputs=tuple(_renamed(argument, names) for argument in operation.inputs))


def renamed_throughout(operation: NnefOperation, names: Mapping[str, str]) -> NnefOperation:
    """Return the operation with other names for what it reads, in attributes too, and for what it makes."""
    return replace(
        renamed(operation, names),
        attributes=tuple((key, _renamed(value, names)) for key, value in operation.attributes),
        outputs=tuple(names.get(name, name) for name in operation.outputs),
    )


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Reference):
        return Reference(names.get(argument.name, argument.name))
    if isinstance(argument, (ArrayLiteral, TupleLiteral)):
        return replace(argument, elements=tuple(_renamed(element, names) for element in argument.elements))
    return argument


def cast_operation(source: str, result: str, dtype: str, near: NnefOperation, note: str = "") -> NnefOperation:
    """Return a cast of a value to a tract element type, in the block of another operation."""
    return NnefOperation(
        "tract_core_cast", (Reference(source),), (("to", dtype),), (result,), block=near.block, note=note
    )


def retyped_note(note: str, dtype: str) -> str:
    """Return what the reader is told of a result, `f32 [1,S]`, for another element type."""
    _, space, shape = note.partition(" ")
    return f"{dtype}{space}{shape}" if note else note


class FreeNames:
    """Identifiers that a document does not have yet; each is handed out once."""

    def __init__(self, graph: NnefGraph) -> None:
        self._taken = {name for operation in graph.operations for name in operation.outputs}

    def take(self, wanted: str) -> str:
        """Return the name, or the first free one that begins with it."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


def negated_twice(operand: Argument, near: NnefOperation, names: FreeNames) -> tuple[NnefOperation, NnefOperation]:
    """Return two negations, of which the second gives a value again: to tract's optimiser, what makes it is out of sight."""
    once = NnefOperation("neg", (operand,), (), (names.take(f"{near.outputs[0]}_negated"),), near.block)
    restored = names.take(f"{near.outputs[0]}_restored")
    return once, NnefOperation("neg", (Reference(once.outputs[0]),), (), (restored,), near.block)


@dataclass
class Widening:
    """Casts of f16 values to f32, each made once, before what reads it first.

    Attributes:
        names: what the document does not have yet.
        made: identifier -> the identifier of its cast.
    """

    names: FreeNames
    made: dict[str, str] = field(default_factory=dict)

    def read(self, operation: NnefOperation, halves: Iterable[str]) -> Iterator[NnefOperation]:
        """Yield the casts that are not there yet, and the operation reading those instead of the values in f16."""
        wide = {}
        for name in halves:
            if name not in self.made:
                self.made[name] = self.names.take(f"{name}_f32")
                yield cast_operation(name, self.made[name], "f32", operation)
            wide[name] = self.made[name]
        yield renamed(operation, wide)

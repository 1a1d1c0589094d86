"""Keys and values kept in f16 by a graph that computes in f32: half the memory of a cache, and of what a step reads of it.

In: a finished document in f32 and its states. Out: the document whose caches are f16, and their description. Attention reads
them as they are (the engine's operators take f16 keys and values for f32 queries); other readers through a cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.half_storage import is_mixed_product
from generic_export.nnef.rewriting import FreeNames, Widening, attribute, cast_operation, retyped_note, with_attribute
from generic_export.nnef.rounding_products import IdentityProducts, RoundedValues
from kvcache.states.tensors import StateTensor

_HALF, _FULL = "f16", "f32"
_ATTENTION = "tract_transformers_sdpa"
_WIDEST = 1024  # of the rows that identity products round: their cost grows with the width, that of casts does not


def keep_states_in_half(
    graph: NnefGraph, states: Sequence[StateTensor], *, by_products: bool = False
) -> tuple[NnefGraph, tuple[StateTensor, ...]]:
    """Return the document with its keys and values in f16, and the states as they are then.

    Other states (recurrences, inputs of a compressor) stay in f32: they hold sums over all tokens, or the residual stream.

    Args:
        graph: computes in f32.
        states: all of its states.
        by_products: round by products instead of casts.
    """
    made = {operation.outputs[0] for operation in graph.operations}
    halved = {state.input_name: state for state in states if _is_cache(state) and state.output_name in made}
    after = tuple(replace(state, dtype=_HALF) if state.input_name in halved else state for state in states)
    outputs = [state.output_name for state in halved.values()]
    shapes = {name: state.shape for state in halved.values() for name in (state.input_name, state.output_name)}
    return give_and_take_half(graph, halved, outputs, shapes if by_products else {}), after


def give_and_take_half(
    graph: NnefGraph, inputs: Iterable[str], outputs: Iterable[str], shapes: Mapping[str, Shape] | None = None
) -> NnefGraph:
    """Return the document with some inputs and outputs in f16, read as caches are; everything else stays in f32.

    Args:
        graph: computes in f32.
        inputs, outputs: names; what appends to one of the inputs rounds what it appends.
        shapes: of those that products round, by name; the last size is a number. Casts round the others.
    """
    names = FreeNames(graph)
    rounding = _Rounding(shapes or {}, RoundedValues(graph), IdentityProducts(names))
    outputs = frozenset(outputs)
    grown = outputs | {_table(operation) for operation in graph.operations if operation.outputs[0] in outputs}
    walk = _Walk(names, Widening(names), frozenset(inputs), outputs, grown, rounding)
    operations = tuple(new for operation in graph.operations for new in walk.rewritten(operation))
    return replace(graph, operations=operations)


def _table(operation: NnefOperation) -> str:
    """Return the name of what an operation picks rows from; "" where it does not."""
    first = operation.inputs[0] if operation.operator == "tract_core_gather" else None
    return first.name if isinstance(first, Reference) else ""


def _is_cache(state: StateTensor) -> bool:
    return state.kind.endswith(("_key", "_value")) and state.axis is not None and state.dtype == _FULL


Shape = Sequence[int | str]


@dataclass
class _Rounding:
    """How f32 values become f16.

    Attributes:
        shapes: of the states that products round, by name.
        anyway: values whose cast becomes part of the product that makes them.
        products: those that are written for the others.
    """

    shapes: Mapping[str, Shape]
    anyway: RoundedValues
    products: IdentityProducts

    def operations(
        self, source: str, result: str, state: str, near: NnefOperation, note: str = ""
    ) -> Iterator[NnefOperation]:
        """Yield what rounds a value of a state."""
        shape = self.shapes.get(state, ())
        width = shape[-1] if shape else 0
        fits = isinstance(width, int) and 1 < width <= _WIDEST
        if fits and source not in self.anyway and not self.anyway.is_repeated(source):
            yield from self.products.rounded(source, result, len(shape), int(width), near, note)
        else:
            yield cast_operation(source, result, _HALF, near, note)


@dataclass
class _Walk:
    """Walks the body once, in order.

    Attributes:
        names: what the document does not have yet.
        widening: the casts to f32.
        inputs, outputs: identifiers of the states that become f16, as they go in and come out.
        grown: outputs, and what they are picked from (`kvcache.states.windows`).
        rounding: how what is new in them is rounded.
        halves: identifiers that are f16 so far.
    """

    names: FreeNames
    widening: Widening
    inputs: frozenset[str]
    outputs: frozenset[str]
    grown: frozenset[str]
    rounding: _Rounding
    halves: set[str] = field(default_factory=set)

    def rewritten(self, operation: NnefOperation) -> Iterator[NnefOperation]:
        """Yield what stands for an operation."""
        result = operation.outputs[0]
        if result in self.inputs:
            self.halves.add(result)
            yield replace(with_attribute(operation, "datum_type", _HALF), note=retyped_note(operation.note, _HALF))
        elif result in self.grown and self._appends(operation):
            yield from self._appended(operation)
        elif result in self.outputs and _table(operation) in self.halves:
            self.halves.add(result)
            picked = replace(operation, note=retyped_note(operation.note, _HALF))
            yield with_attribute(picked, "datum_type", _HALF)
        elif result in self.outputs:
            wide = self.names.take(f"{result}_f32")
            self.halves.add(result)
            self.widening.made[result] = wide
            yield from self._widening(replace(operation, outputs=(wide, *operation.outputs[1:])), ())
            yield from self.rounding.operations(wide, result, result, operation, retyped_note(operation.note, _HALF))
        else:
            yield from self._widening(operation, self._read_as_they_are(operation))

    def _read_as_they_are(self, operation: NnefOperation) -> Sequence[Argument]:
        """Return the arguments that the engine takes in f16 beside others in f32."""
        if operation.operator == _ATTENTION:
            return operation.inputs[1:3]
        if operation.operator == "tract_core_cast" and attribute(operation, "to") == _HALF:
            return operation.inputs  # the engine drops a cast to the type that a value has
        halves = [name for name in references(operation) if name in self.halves]
        return operation.inputs[0].elements if is_mixed_product(operation, halves) else ()  # type: ignore[union-attr]

    def _appends(self, operation: NnefOperation) -> bool:
        """Say whether an operation puts new positions behind those of a cache."""
        parts = operation.inputs[0] if operation.inputs else None
        if operation.operator != "concat" or not isinstance(parts, ArrayLiteral) or len(parts.elements) != 2:
            return False
        first = parts.elements[0]
        return isinstance(first, Reference) and first.name in self.inputs

    def _appended(self, operation: NnefOperation) -> Iterator[NnefOperation]:
        """Round the new positions, and append those."""
        past, new = operation.inputs[0].elements  # type: ignore[union-attr]
        (result,) = operation.outputs
        rounded = self.names.take(f"{result}_new")
        yield from self.rounding.operations(new.name, rounded, past.name, operation)  # type: ignore[union-attr]
        self.halves.add(result)
        yield replace(
            operation,
            inputs=(ArrayLiteral((past, Reference(rounded))), *operation.inputs[1:]),
            note=retyped_note(operation.note, _HALF),
        )

    def _widening(self, operation: NnefOperation, as_they_are: Sequence[Argument]) -> Iterator[NnefOperation]:
        """Yield the casts that an operation needs, and the operation reading them."""
        kept = {argument.name for argument in as_they_are if isinstance(argument, Reference)}
        read = [name for name in dict.fromkeys(references(operation)) if name in self.halves - kept]
        yield from self.widening.read(operation, read)

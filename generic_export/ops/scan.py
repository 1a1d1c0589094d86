"""Loops over an axis: `tract_core_scan`, with the body as a fragment that another builder writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument, ArrayLiteral, NnefFragment, TupleLiteral
from generic_export.nnef.text import fragment_text
from generic_export.ops.indexing import arange
from generic_export.torch_graph.dims import Dim, Shape
from generic_export.torch_graph.naming import IdentifierAllocator, identifier
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.emissions import inner_name, operation_of, reachable

Values = Sequence[Value]
Step = Callable[[NnefBuilder, Values, Values, Values], tuple[Values, Values]]
"""(builder of the body, slices, states, constants) -> (next states, results)."""


@dataclass(frozen=True)
class Loop:
    """What a loop reads.

    Attributes:
        sequences: values cut along `axis`, one slice (of size 1 there) per step.
        states: initial states; a step's new states have the same shapes.
        constants: values that every step reads whole.
        axis: of the sequences, and of the collected results.
        reverse: from the last slice to the first; results stand where their slice did.
    """

    sequences: Values
    states: Values
    constants: Values = ()
    axis: int = 0
    reverse: bool = False


def scan(b: NnefBuilder, name: str, loop: Loop, step: Step) -> tuple[Values, Values]:
    """Emit a loop and return the results collected along the axis, then the last states.

    Args:
        b: the builder of the graph.
        name: of the fragment; loops whose bodies read the same share one.
        loop: what is read.
        step: writes the body.
    """
    states = len(loop.states)
    loop, step = _with_sizes(b, loop, step)
    body = _Body(b, loop, step)
    fragment = body.fragment(b, name)
    chunk = -1 if loop.reverse else 1

    def rows(names: Sequence[str], values: Values, *last: Sequence[Argument]) -> ArrayLiteral:
        # The elements are values still: they get their names when the graph is finished.
        columns = zip(names, (b.materialised(value) for value in values), *last, strict=True)
        return ArrayLiteral(tuple(TupleLiteral(row) for row in columns))  # type: ignore[arg-type]

    sequences = [_unknown_at_load(b, value) for value in loop.sequences]
    full = [TupleLiteral((result, "full", loop.axis, chunk)) for result in body.result_names]
    last = [TupleLiteral((result, "last", 0, 1)) for result in body.next_names]
    attributes: dict[str, Argument] = {
        "body": fragment.name,
        "scan": rows(body.slice_names, sequences, [loop.axis] * len(sequences), [chunk] * len(sequences)),
        "full": rows(body.constant_names, loop.constants),
        "state": rows(body.state_names, loop.states, body.next_names),
        "output": ArrayLiteral((*full, *last)),
        # docs/contributing/engine-facts.md#scan-loops: with 0 the states of one turn are the initial states of the next.
        "reset_every_turn": 0 if _goes_on(b, loop) else 1,
    }
    steps = loop.sequences[0].shape[loop.axis]
    facts = [(_with_axis(value.shape, loop.axis, steps), value.dtype) for value in body.results]
    facts += [(state.shape, state.dtype) for state in loop.states]
    outputs = b.emit_many("tract_core_scan", [], facts, attributes=attributes)
    return outputs[: len(body.results)], outputs[len(body.results) :][:states]


def _with_sizes(b: NnefBuilder, loop: Loop, step: Step) -> tuple[Loop, Step]:
    """Add a state [S], which no step changes, for each symbol S that the body's shapes have in products and quotients alone.

    The engine takes the symbols of a body from the shapes that it is given, and finds no B and no S in a batch of `B*S`
    (docs/contributing/engine-facts.md#scan-loops).
    """
    read = [*(_with_axis(value.shape, loop.axis, 1) for value in loop.sequences)]
    read += [value.shape for value in (*loop.states, *loop.constants)]
    sizes = [size for shape in read for size in shape if isinstance(size, sympy.Expr)]
    found = {size for size in sizes if size.is_Symbol}
    missing = sorted(set().union(*(size.free_symbols for size in sizes)) - found, key=str)
    count = len(missing)

    def with_sizes(inner: NnefBuilder, slices: Values, states: Values, constants: Values) -> tuple[Values, Values]:
        own = len(states) - count
        after, results = step(inner, slices, states[:own], constants)
        return [*after, *states[own:]], results

    if not missing:
        return loop, step
    return replace(loop, states=(*loop.states, *(arange(b, 0, symbol) for symbol in missing))), with_sizes


def _goes_on(b: NnefBuilder, loop: Loop) -> bool:
    """Say whether a loop is along an axis that comes in pieces, so that each piece begins where the last one ended.

    Raises:
        TranslationError: it begins at the end of that axis.
    """
    symbol, steps = b.spelling.streamed, loop.sequences[0].shape[loop.axis]
    if not symbol or symbol not in {str(name) for name in getattr(steps, "free_symbols", ())}:
        return False
    if loop.reverse:
        raise TranslationError(
            f"a loop from the last step to the first cannot run on a stream along {symbol}.",
            "Export without `streaming`, or without the backward direction.",
        )
    # A state that is an input is the caller's to carry on.
    made_of = reachable(b.emissions, loop.states, set())
    return not any(emission.operator == "tract_core_external" for emission in made_of)


def _unknown_at_load(b: NnefBuilder, sequence: Value) -> Value:
    """Add a zero that a graph input makes to a constant sequence.

    tract takes the facts of a loop's slices from the whole sequence, its value included (de_scan in tract-nnef's ops/core/scan.rs):
    a step would read all of a constant instead of its slice.
    """
    if b.varies(sequence):
        return b.materialised(sequence)
    inputs = (emission.outputs[0] for emission in b.emissions if emission.operator == "tract_core_external")
    given = next((value for value in inputs if 0 not in value.shape), None)
    if given is None:
        raise TranslationError(
            "tract cannot run a loop over a constant in a graph without inputs.", "Compute it before the export."
        )
    zero = _zero_of(b, given)
    if sequence.dtype is torch.bool:
        return b.binary("or", sequence, b.binary("gt", zero, b.scalar(0, torch.int64), dtype=torch.bool))
    return b.binary("add", sequence, b.cast(zero, sequence.dtype))


def _zero_of(b: NnefBuilder, given: Value) -> Value:
    """Return a zero (int64, of rank 0) that the engine does not know to be one before it runs."""
    for axis in range(given.rank):
        given = b.slice(given, axis, 0, 1)
    first = b.squeeze(given, list(range(given.rank)))
    if first.dtype is not torch.bool:
        first = b.binary("gt", first, b.scalar(0, first.dtype), dtype=torch.bool)
    return b.binary("min", b.cast(first, torch.int64), b.scalar(0, torch.int64))


def _with_axis(shape: Shape, axis: int, size: Dim) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


class _Body:
    """The body of one loop, written once, as text."""

    def __init__(self, outer: NnefBuilder, loop: Loop, step: Step) -> None:
        self._inner = NnefBuilder(numerics=outer.numerics, spelling=outer.spelling, block=outer.block, hint="step")
        slices = [_with_axis(value.shape, loop.axis, 1) for value in loop.sequences]
        self.slice_names, slice_values = self._parameters("x", slices, loop.sequences)
        self.state_names, states = self._parameters("state", [value.shape for value in loop.states], loop.states)
        self.constant_names, constants = self._parameters(
            "w", [value.shape for value in loop.constants], loop.constants
        )
        after, results = step(self._inner, slice_values, states, constants)
        self.next_names = [f"next_{index}" for index in range(len(after))]
        self.result_names = [f"y_{index}" for index in range(len(results))]
        # A value bears one name: what is both a state and a result, or an untouched parameter, is copied.
        self.after = [self._named(value, name) for value, name in zip(after, self.next_names, strict=True)]
        self.results = [self._named(value, name) for value, name in zip(results, self.result_names, strict=True)]

    def _parameters(self, prefix: str, shapes: Sequence[Shape], outer: Values) -> tuple[list[str], list[Value]]:
        names = [f"{prefix}_{index}" for index in range(len(outer))]
        values = [
            self._inner.external(shape, value.dtype, name)
            for name, shape, value in zip(names, shapes, outer, strict=True)
        ]
        return names, values

    def _named(self, value: Value, name: str) -> Value:
        source = self._inner.materialised(value)
        (copy,) = self._inner.emit_many("copy", [source], [(source.shape, source.dtype)], label=name)
        return copy

    def fragment(self, outer: NnefBuilder, name: str) -> NnefFragment:
        """Return the body as a fragment of the document, one that is there already when it reads the same."""
        made = [*self.after, *self.results]
        emissions = reachable(self._inner.emissions, made, kept=set())
        names_made = [*self.next_names, *self.result_names]
        outputs = {value.number: name for value, name in zip(made, names_made, strict=True)}
        parameters = [*self.slice_names, *self.state_names, *self.constant_names]
        allocator = IdentifierAllocator("natural_verbose", [*parameters, *outputs.values()])
        names: dict[int, str] = {}
        for emission in self._inner.emissions:
            for value in emission.outputs:
                if emission.operator == "tract_core_external":
                    names[value.number] = emission.label
                else:
                    names[value.number] = outputs.get(value.number) or allocator.allocate(inner_name(emission))
        operations = [operation_of(item, names) for item in emissions if item.operator != "tract_core_external"]
        calls = frozenset(operation.operator for operation in operations)
        outer.fragments.update(
            {key: value for key, value in self._inner.fragments.items() if key not in outer.fragments}
        )

        base, count = identifier(name), 0
        while True:
            candidate = base if count == 0 else f"{base}_{count}"
            text = fragment_text(candidate, parameters, list(outputs.values()), operations)
            known = outer.fragments.setdefault(candidate, NnefFragment(candidate, text, calls))
            if known.text == text:
                return known
            count += 1

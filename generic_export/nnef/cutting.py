"""A part of a document as a document of its own: what computes some of its values.

In: a document, values to give, and values that are given from outside. Out: a document with what those need, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from generic_export.errors import GraphError
from generic_export.nnef.graph import (
    Argument,
    ArrayLiteral,
    DimLiteral,
    NnefFragment,
    NnefGraph,
    NnefOperation,
    TupleLiteral,
    references,
)

EXTERNAL = "tract_core_external"


def part_of(
    graph: NnefGraph, outputs: Sequence[str], given: Sequence[NnefOperation] = (), name: str | None = None
) -> NnefGraph:
    """Return what computes some values of a document.

    Args:
        graph: the whole; it is left alone.
        outputs: identifiers of values, in the order of the part's outputs.
        given: externals that stand for values of the whole, which are then not computed.
        name: of the part; None keeps that of the whole.

    Raises:
        GraphError: there is no such value.
    """
    replaced = {operation.outputs[0]: operation for operation in given}
    makers = {output: each for each in graph.operations for output in each.outputs} | replaced
    missing = [output for output in outputs if output not in makers]
    if missing:
        raise GraphError(f"graph {graph.name!r} has no value {missing[0]!r}.", "Use a value that an operation assigns.")
    wanted = _reached(outputs, makers)
    operations = [each for each in graph.operations if wanted.intersection(each.outputs).difference(replaced)]
    operations = [*(each for each in given if each.outputs[0] in wanted), *operations]
    externals = [each for each in operations if each.operator == EXTERNAL]
    body = [each for each in operations if each.operator != EXTERNAL]
    symbols, assertions = _sizes(graph, operations)
    return replace(
        graph,
        name=name or graph.name,
        inputs=tuple(each.outputs[0] for each in externals),
        outputs=tuple(outputs),
        operations=(*externals, *body),
        variables=tuple(each for each in graph.variables if each.label in set(_labels(body))),
        fragments=_called(graph.fragments, body),
        symbols=symbols,
        assertions=assertions,
        origins=tuple((result, tensor) for result, tensor in graph.origins if result in wanted),
    )


def _reached(outputs: Sequence[str], makers: Mapping[str, NnefOperation]) -> set[str]:
    found: set[str] = set()
    pending = list(outputs)
    while pending:
        value = pending.pop()
        if value not in found:
            found.update(makers[value].outputs)
            pending += references(makers[value])
    return found


def _labels(operations: Sequence[NnefOperation]) -> list[Argument]:
    return [
        value for each in operations if each.operator == "variable" for key, value in each.attributes if key == "label"
    ]


def _called(fragments: Sequence[NnefFragment], operations: Sequence[NnefOperation]) -> tuple[NnefFragment, ...]:
    """Return the fragments that are called, by operations or by each other."""
    known = {fragment.name: fragment for fragment in fragments}
    used: set[str] = set()
    pending = [each.operator for each in operations]
    while pending:
        operator = pending.pop()
        if operator in known and operator not in used:
            used.add(operator)
            pending += known[operator].calls
    return tuple(fragment for fragment in fragments if fragment.name in used)


def _sizes(graph: NnefGraph, operations: Sequence[NnefOperation]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the symbols that the operations speak of, and what is said of those alone."""
    spoken = {word for each in operations for text in _texts(each) for word in re.findall(r"[A-Za-z_]\w*", text)}
    symbols = tuple(symbol for symbol in graph.symbols if symbol in spoken)
    others = set(graph.symbols).difference(symbols)
    said = tuple(text for text in graph.assertions if others.isdisjoint(re.findall(r"[A-Za-z_]\w*", text)))
    return symbols, said


def _texts(operation: NnefOperation) -> list[str]:
    found: list[str] = []
    pending: list[Argument] = [*operation.inputs, *(value for _, value in operation.attributes)]
    while pending:
        argument = pending.pop()
        if isinstance(argument, DimLiteral):
            found.append(argument.text)
        elif isinstance(argument, (ArrayLiteral, TupleLiteral)):
            pending += argument.elements
    return found


__all__ = ["EXTERNAL", "part_of"]

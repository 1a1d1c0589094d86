"""Tensors that are stored as the sum of two: what reads one is done for both, and the results are added.

In: an `NnefGraph` and the labels of such tensors. Out: the graph that reads both. Products of f16 values are added before they are
rounded to f16, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from generic_export.nnef.graph import NnefGraph, NnefOperation, NnefVariable, Reference, references
from generic_export.nnef.rewriting import FreeNames, attribute, cast_operation, renamed, retyped_note, with_attribute


def with_remainders(graph: NnefGraph, labels: Mapping[str, str]) -> NnefGraph:
    """Return the graph with a second variable beside each of some.

    Args:
        graph: the document; products and gathers alone read these variables (`StorageUse.addable`).
        labels: label of the variable -> label of the second one, of the same shape and type.
    """
    names = FreeNames(graph)
    second: dict[str, str] = {}
    operations: list[NnefOperation] = []
    for operation in graph.operations:
        label = labels.get(str(attribute(operation, "label"))) if operation.operator == "variable" else None
        read = [name for name in references(operation) if name in second]
        if label is not None:
            name = operation.outputs[0]
            second[name] = names.take(f"{name}_remainder")
            operations += [operation, replace(with_attribute(operation, "label", label), outputs=(second[name],))]
        elif read and operation.operator == "reshape":  # of a table that is folded out and back before a gather
            name = operation.outputs[0]
            second[name] = names.take(f"{name}_remainder")
            operations += [operation, replace(renamed(operation, second), outputs=(second[name],))]
        elif read:
            operations += _added_up(operation, {name: second[name] for name in read}, names)
        else:
            operations.append(operation)
    variables: list[NnefVariable] = []
    for variable in graph.variables:
        variables.append(variable)
        if variable.label in labels:
            variables.append(replace(variable, label=labels[variable.label], residual_of=variable.label))
    return replace(graph, operations=tuple(operations), variables=tuple(variables))


def _added_up(operation: NnefOperation, second: Mapping[str, str], names: FreeNames) -> Iterator[NnefOperation]:
    """Yield an operation on the first tensors, the same on the second ones, and their sum under the old name."""
    result, rounds = operation.outputs[0], attribute(operation, "acc") == "f16"
    note = retyped_note(operation.note, "f32") if rounds else operation.note
    wide = with_attribute(operation, "acc", "f32") if rounds else operation
    first, rest = names.take(f"{result}_blocks"), names.take(f"{result}_remainder")
    yield replace(wide, outputs=(first,), note=note)
    yield replace(renamed(wide, second), outputs=(rest,), note=note)
    total = names.take(f"{result}_total") if rounds else result
    yield NnefOperation("add", (Reference(first), Reference(rest)), (), (total,), block=operation.block, note=note)
    if rounds:
        yield cast_operation(total, result, "f16", operation, operation.note)


__all__ = ["with_remainders"]

"""f16 tensors under a graph that computes in f32: the archive of f16, without f16's range and rounding in between.

In: a document in f32. Out: the same whose matrices are stored in f16. The engine multiplies f16 weights with f32 values as they
are (facts: tract 0.23.9, mixed kernels of `linalg`), and picks rows from an f16 table; whatever else reads such a tensor reads it
through a cast, which is made once, when the archive is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from generic_export.nnef.graph import ArrayLiteral, NnefGraph, NnefOperation, NnefVariable, Reference, references
from generic_export.nnef.rewriting import (
    FreeNames,
    Widening,
    attribute,
    cast_operation,
    renamed,
    retyped_note,
    with_attribute,
)

_HALF, _FULL = "f16", "f32"
_VIEWS = frozenset({"reshape", "slice", "squeeze", "transpose", "unsqueeze"})
_WIDENS_ITSELF = frozenset({"tract_moe_ffn"})  # takes any float for any operand, and computes in f32


def store_in_half(graph: NnefGraph, parameters: Collection[str]) -> NnefGraph:
    """Return the graph with some of its f32 tensors of rank 2 and more stored in f16, and read so that it computes in f32.

    Vectors (scales of norms, biases) stay in f32: they are small, and the engine would widen them before each use.

    Args:
        graph: computes in f32.
        parameters: names of the model's tensors that may be rounded to f16; computed tables are better left out.
    """
    chosen = {
        variable.label
        for variable in graph.variables
        if variable.dtype == _FULL and len(variable.shape) >= 2 and variable.parameter in parameters
    }
    names = FreeNames(graph)
    walk = _Walk(names, Widening(names), chosen)
    operations = tuple(new for operation in graph.operations for new in walk.rewritten(operation))
    variables = tuple(
        replace(variable, dtype=_HALF) if variable.label in chosen else variable for variable in graph.variables
    )
    return replace(graph, operations=operations, variables=variables)


@dataclass
class _Walk:
    """Walks the body once, in order.

    Attributes:
        names: what the document does not have yet.
        widening: the casts to f32.
        chosen: labels of what is stored in f16.
        halves: identifiers that are f16 so far.
    """

    names: FreeNames
    widening: Widening
    chosen: set[str]
    halves: set[str] = field(default_factory=set)

    def rewritten(self, operation: NnefOperation) -> Iterator[NnefOperation]:
        """Yield what stands for an operation."""
        read = [name for name in dict.fromkeys(references(operation)) if name in self.halves]
        label = str(attribute(operation, "label"))
        if operation.operator == "variable" and label in self.chosen:
            yield self._half(operation)
        elif not read or operation.operator in _WIDENS_ITSELF or is_mixed_product(operation, read):
            yield operation
        elif operation.operator == "tract_core_gather" and operation.inputs[0] == Reference(read[0]):
            yield from self._gather(operation)
        elif operation.operator in _VIEWS:
            yield self._half(operation)
        else:
            yield from self.widening.read(operation, read)

    def _half(self, operation: NnefOperation) -> NnefOperation:
        self.halves.update(operation.outputs)
        return replace(operation, note=retyped_note(operation.note, _HALF))

    def _gather(self, operation: NnefOperation) -> Iterator[NnefOperation]:
        """Pick rows in f16, and widen those."""
        (result,) = operation.outputs
        rows = self.names.take(f"{result}_rows")
        gathered = replace(operation, outputs=(rows,), note=retyped_note(operation.note, _HALF))
        yield with_attribute(gathered, "datum_type", _HALF)
        yield cast_operation(rows, result, _FULL, operation, operation.note)


def is_mixed_product(operation: NnefOperation, halves: list[str]) -> bool:
    """Say whether the engine multiplies an f16 tensor with one in f32 here: two operands, sums in f32."""
    operands = operation.inputs[0] if operation.inputs else None
    if operation.operator != "tract_core_einsum" or not isinstance(operands, ArrayLiteral):
        return False
    return len(operands.elements) == 2 and len(halves) == 1 and attribute(operation, "acc") == _FULL


# Tensors that are stored as the sum of two: what reads one is done for both, and the results are added.
# In: an `NnefGraph` and the labels of such tensors. Out: the graph that reads both. Products of f16 values are added
# before they are rounded to f16, once.
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

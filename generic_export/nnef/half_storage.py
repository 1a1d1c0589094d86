"""f16 tensors under a graph that computes in f32: the archive of f16, without f16's range and rounding in between.

In: a document in f32. Out: the same whose matrices are stored in f16. The engine multiplies f16 weights with f32 values as they
are (facts: tract 0.23.9, mixed kernels of `linalg`), and picks rows from an f16 table; whatever else reads such a tensor reads it
through a cast, which is made once, when the archive is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from generic_export.nnef.graph import ArrayLiteral, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.rewriting import (
    FreeNames,
    Widening,
    attribute,
    cast_operation,
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

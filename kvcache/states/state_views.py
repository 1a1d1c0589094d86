"""Keeps the concatenation that grows a cache whole: tract would take it apart, and then not turn it into engine state.

In: a finished NNEF document. Out: the same, except that what reads a grown cache in parts reads it through an operation that
tract's optimiser does not look through. Facts: tract 0.23.9, `optim/slice.rs` (slices move up) and `concat_then_einsum.rs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation, Reference
from generic_export.nnef.rewriting import FreeNames, negated_twice

_MOVES = frozenset({"tract_core_cast", "transpose", "reshape", "unsqueeze", "squeeze", "tract_core_broadcast", "tile"})


def keep_states_whole(graph: NnefGraph) -> NnefGraph:
    """Return a document whose growing states stay one concatenation each.

    Two rules of tract end up with slices of the past alone, which must have one reader to become engine state: a slice of a
    concatenation is the concatenation of slices, and a product that sums over a concatenated axis (partly rotated queries)
    is the sum of products with slices of the other operand.
    """
    rewriter = _Rewriter(graph)
    operations = [new for operation in graph.operations for new in rewriter.rewritten(operation)]
    return graph if operations == list(graph.operations) else replace(graph, operations=tuple(operations))


@dataclass
class _Rewriter:
    """Walks the body once, in order."""

    graph: NnefGraph

    def __post_init__(self) -> None:
        self.views: set[str] = set()
        self.makers: dict[str, NnefOperation] = {}
        self.names = FreeNames(self.graph)

    def rewritten(self, operation: NnefOperation) -> list[NnefOperation]:
        """Return what stands for an operation."""
        made = self._rewritten(operation)
        for each in made:
            self.makers |= dict.fromkeys(each.outputs, each)
        return made

    def _rewritten(self, operation: NnefOperation) -> list[NnefOperation]:
        source = operation.inputs[0] if operation.inputs else None
        if self._grows_a_state(operation):
            self.views.update(operation.outputs)
        elif isinstance(source, Reference) and source.name in self.views:
            if operation.operator in _MOVES:
                self.views.update(operation.outputs)
            elif operation.operator == "slice":
                return self._gathered(operation, source)
        elif operation.operator == "concat" and isinstance(source, ArrayLiteral):
            if any(isinstance(part, Reference) and part.name in self.views for part in source.elements):
                self.views.update(operation.outputs)
        elif operation.operator == "tract_core_einsum" and isinstance(source, ArrayLiteral):
            return self._with_hidden_concats(operation, source)
        return [operation]

    def _grows_a_state(self, operation: NnefOperation) -> bool:
        if operation.operator != "concat" or operation.outputs[0] not in self.graph.outputs:
            return False
        parts = operation.inputs[0]
        names = (
            [part.name for part in parts.elements if isinstance(part, Reference)]
            if isinstance(parts, ArrayLiteral)
            else []
        )
        return any(name in self.graph.inputs for name in names)

    def _gathered(self, operation: NnefOperation, source: Reference) -> list[NnefOperation]:
        """Return a slice with fixed bounds as a gather."""
        attributes = dict(operation.attributes)
        axis, begin, end = (_number(attributes.get(name)) for name in ("axes", "begin", "end"))
        if axis is None or begin is None or end is None:
            return [operation]
        step = _number(attributes.get("stride")) or 1
        alone = len(range(begin, end, step)) == 1
        # tract turns a gather of one element back into a slice: all are gathered then, and the slice follows.
        places = self._operation(
            "tract_core_range", (0 if alone else begin, end, 1 if alone else step), operation, "places"
        )
        index = Reference(places.outputs[0])
        gathered = NnefOperation(
            "tract_core_gather", (source, index), (("axis", axis),), operation.outputs, operation.block, operation.note
        )
        if not alone:
            return [places, gathered]
        every = replace(gathered, outputs=(self.names.take(f"{operation.outputs[0]}_whole"),), note="")
        return [places, every, replace(operation, inputs=(Reference(every.outputs[0]),))]

    def _with_hidden_concats(self, operation: NnefOperation, operands: ArrayLiteral) -> list[NnefOperation]:
        """Return a product with a state in which no other operand is, to tract, a concatenation."""
        names = [each.name if isinstance(each, Reference) else "" for each in operands.elements]
        if not any(name in self.views for name in names):
            return [operation]
        added: list[NnefOperation] = []
        hidden: list[Argument] = []
        for name, operand in zip(names, operands.elements, strict=True):
            if name not in self.views and self._is_concat(name):
                once, twice = negated_twice(operand, operation, self.names)
                added += [once, twice]
                hidden.append(Reference(twice.outputs[0]))
            else:
                hidden.append(operand)
        return [*added, replace(operation, inputs=(ArrayLiteral(tuple(hidden)), *operation.inputs[1:]))]

    def _is_concat(self, name: str) -> bool:
        maker = self.makers.get(name)
        while maker is not None and maker.operator in _MOVES and isinstance(maker.inputs[0], Reference):
            maker = self.makers.get(maker.inputs[0].name)
        return maker is not None and maker.operator == "concat"

    def _operation(
        self, operator: str, inputs: tuple[Argument, ...], near: NnefOperation, suffix: str
    ) -> NnefOperation:
        return NnefOperation(operator, inputs, (), (self.names.take(f"{near.outputs[0]}_{suffix}"),), near.block)


def _number(argument: Argument | Mapping | None) -> int | None:
    """Return the one number of an array of one; None when it is a size that is not fixed."""
    element = argument.elements[0] if isinstance(argument, ArrayLiteral) and len(argument.elements) == 1 else None
    return element if isinstance(element, int) else None

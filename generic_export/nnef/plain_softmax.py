"""Masked softmax written so that tract does not fuse it into `scaled_masked_softmax`, whose CUDA kernel is wrong.

In: a finished document. Out: the same, with `sub` of the negated mask in the place of the sums that tract fuses with a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from generic_export.nnef.attention_forms import fused_source, scaled_operand
from generic_export.nnef.graph import Argument, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.rewriting import FreeNames, negated_twice


def with_plain_softmax(graph: NnefGraph) -> NnefGraph:
    """Return the document without a softmax that tract fuses with its mask; results are the same."""
    walk = _Walk(FreeNames(graph))
    operations = [new for operation in graph.operations for new in walk.rewritten(operation)]
    read = {*graph.outputs, *(name for operation in operations for name in references(operation))}
    kept = (each for each in operations if each.outputs[0] in read or each.outputs[0] not in walk.replaced)
    return replace(graph, operations=tuple(kept))


@dataclass
class _Walk:
    """Walks the body once, in order.

    Attributes:
        names: identifiers that the document does not have yet.
        producers: identifier -> the operation that makes it.
        negated: mask -> its negation, made once for all layers.
        replaced: sums that a difference stands for.
    """

    names: FreeNames
    producers: dict[str, NnefOperation] = field(default_factory=dict)
    negated: dict[Argument, Argument] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)

    def rewritten(self, operation: NnefOperation) -> Iterator[NnefOperation]:
        """Yield what stands for an operation."""
        self.producers.update(dict.fromkeys(operation.outputs, operation))
        source = fused_source(operation, self.producers)
        if source is None:
            yield operation
        elif source.operator == "select":
            once, restored = negated_twice(operation.inputs[0], operation, self.names)
            yield from (once, restored)
            yield _of(operation, restored)
        else:
            yield from self._of_difference(operation, source)

    def _of_difference(self, softmax: NnefOperation, addition: NnefOperation) -> Iterator[NnefOperation]:
        """Yield the softmax of scores minus the negated mask."""
        place = scaled_operand(addition, self.producers) or 0
        scores, mask = addition.inputs[place], addition.inputs[1 - place]
        (result,) = softmax.outputs
        self.replaced.update(addition.outputs)
        if mask not in self.negated:
            negation = NnefOperation("neg", (mask,), (), (self.names.take(f"{result}_negated_mask"),), softmax.block)
            yield negation
            self.negated[mask] = Reference(negation.outputs[0])
        masked = self.names.take(f"{result}_masked")
        inputs = (scores, self.negated[mask])
        difference = NnefOperation("sub", inputs, (), (masked,), softmax.block, softmax.note)
        yield difference
        yield _of(softmax, difference)


def _of(softmax: NnefOperation, source: NnefOperation) -> NnefOperation:
    return replace(softmax, inputs=(Reference(source.outputs[0]), *softmax.inputs[1:]))


__all__ = ["with_plain_softmax"]

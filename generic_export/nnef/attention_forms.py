"""The forms in which a document computes attention, as far as they decide whether a device runs it right.

In: operations of a document. Out: how often each form occurs. `engines/device_forms.py` lists where a form is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from generic_export.nnef.graph import Argument, ArrayLiteral, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.rewriting import FreeNames, attribute, negated_twice

FUSED_SOFTMAX = "tract_transformers_scaled_masked_softmax"
ATTENTION = "tract_transformers_sdpa"
PADDING_ROWS = 64
"""Rows of zeros behind keys and values in the padded form: a full tile of the CUDA kernel (32 rows), and the tail tile."""


class AttentionForm(StrEnum):
    """How an operation of attention, or of its cache, is written."""

    SDPA = "sdpa"
    PADDED_SDPA = "padded sdpa"
    SCALED_MASKED_SOFTMAX = "scaled_masked_softmax"
    FUSIBLE_SOFTMAX = "fusible softmax"
    PLAIN_SOFTMAX = "plain softmax"
    CAST_CACHE = "cache rounded by a cast"
    ROUNDED_CACHE = "cache rounded by a product"


def attention_forms(operations: Iterable[NnefOperation]) -> Counter[AttentionForm]:
    """Count the forms of attention of a document.

    A softmax that tract does not fuse with a mask counts as plain, whether it belongs to attention or not.

    Args:
        operations: the whole body, in order.
    """
    forms: Counter[AttentionForm] = Counter()
    producers: dict[str, NnefOperation] = {}
    for operation in operations:
        form = _form_of(operation, producers)
        if form is not None:
            forms[form] += 1
        producers.update(dict.fromkeys(operation.outputs, operation))
    return forms


def _form_of(operation: NnefOperation, producers: Mapping[str, NnefOperation]) -> AttentionForm | None:
    if operation.operator == FUSED_SOFTMAX:
        return AttentionForm.SCALED_MASKED_SOFTMAX
    if operation.operator == ATTENTION:
        return AttentionForm.PADDED_SDPA if _is_padded(operation, producers) else AttentionForm.SDPA
    if operation.operator == "softmax":
        fused = fused_source(operation, producers) is not None
        return AttentionForm.FUSIBLE_SOFTMAX if fused else AttentionForm.PLAIN_SOFTMAX
    return None


def fused_source(softmax: NnefOperation, producers: Mapping[str, NnefOperation]) -> NnefOperation | None:
    """Return the operation that tract's `detect_scaled_masked_softmax` fuses with a softmax; None where it fuses none.

    The engine fuses a sum with a scaled operand, and a choice between scores and a constant (scaled_masked_softmax.rs).
    """
    source = _producer(softmax.inputs[0] if softmax.inputs else None, producers)
    if softmax.operator != "softmax" or source is None or source.operator not in ("add", "select"):
        return None
    if source.operator == "add" and scaled_operand(source, producers) is None:
        return None
    return source


def scaled_operand(addition: NnefOperation, producers: Mapping[str, NnefOperation]) -> int | None:
    """Return which operand of a sum is a product (0 or 1); None where neither is."""
    for place, argument in enumerate(addition.inputs):
        source = _producer(argument, producers)
        if source is not None and source.operator in ("mul", "div"):
            return place
    return None


def _is_padded(operation: NnefOperation, producers: Mapping[str, NnefOperation]) -> bool:
    """Say whether keys and values end with rows of padding, and a mask hides them."""
    if len(operation.inputs) < 4 or attribute(operation, "is_causal") is not False:
        return False
    return all(_ends_with_padding(argument, producers) for argument in operation.inputs[1:3])


def _ends_with_padding(argument: Argument, producers: Mapping[str, NnefOperation]) -> bool:
    joined = _producer(argument, producers)
    if joined is None or joined.operator != "concat" or not joined.inputs:
        return False
    parts = joined.inputs[0]
    last = _producer(parts.elements[-1], producers) if isinstance(parts, ArrayLiteral) else None
    if last is None or last.operator != "tract_core_broadcast":
        return False
    shape = attribute(last, "shape")
    return isinstance(shape, ArrayLiteral) and len(shape.elements) == 4 and shape.elements[2] == PADDING_ROWS


def _producer(argument: Argument | None, producers: Mapping[str, NnefOperation]) -> NnefOperation | None:
    return producers.get(argument.name) if isinstance(argument, Reference) else None


# Masked softmax written so that tract does not fuse it into `scaled_masked_softmax`, whose CUDA kernel is wrong.
# In: a finished document. Out: the same, with `sub` of the negated mask in the place of the sums that tract fuses with
# a softmax.
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


__all__ = ["PADDING_ROWS", "AttentionForm", "attention_forms", "fused_source", "scaled_operand", "with_plain_softmax"]

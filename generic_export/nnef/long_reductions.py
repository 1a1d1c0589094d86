"""Products that sum over very many channels, split into several that are added: panels of a prompt then fit into the CPU's caches.

In: a finished document. Out: the same with `x W` as `x_0 W_0 + x_1 W_1 + ...` where the sum is long and W is stored in f16 or f32.
tract cuts the matrices when it loads the archive. Q4_0 goes token by token, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from generic_export.nnef.graph import ArrayLiteral, NnefGraph, NnefOperation, Reference
from generic_export.nnef.rewriting import FreeNames, attribute

_FLOATS = ("f16", "f32")
_FULL = "f32"


@dataclass(frozen=True)
class LongReductions:
    """Which sums are long, and what becomes of them.

    Attributes:
        least: channels that a split product has.
        piece: channels that each of its parts sums over, at most.
    """

    least: int
    piece: int


MEASURED = LongReductions(least=8192, piece=2048)
"""On CPUs, by scripts/bench_reductions.py (docs/contributing/engine-facts.md#long-sums): faster on Intel, and as fast on AMD."""


def split_long_reductions(graph: NnefGraph, lengths: LongReductions = MEASURED) -> NnefGraph:
    """Return the document with its long products in parts.

    Args:
        graph: the document.
        lengths: which products, and how long the parts are.
    """
    stored = {variable.label: variable for variable in graph.variables}
    weights = {
        operation.outputs[0]: stored[str(attribute(operation, "label"))]
        for operation in graph.operations
        if operation.operator == "variable"
    }
    widths = {
        name: variable.shape[1]
        for name, variable in weights.items()
        if len(variable.shape) == 2 and variable.dtype in _FLOATS and variable.shape[1] >= lengths.least
    }
    if not widths:
        return graph
    walk = _Walk(FreeNames(graph), widths, lengths.piece, {})
    return replace(graph, operations=tuple(new for each in graph.operations for new in walk.rewritten(each)))


@dataclass
class _Walk:
    """Walks the body once, in order.

    Attributes:
        names: what the document does not have yet.
        widths: matrices that may be cut -> their channels.
        piece: most channels of a part.
        cut: what is cut along its last axis -> its parts.
    """

    names: FreeNames
    widths: Mapping[str, int]
    piece: int
    cut: dict[str, tuple[str, ...]]

    def rewritten(self, operation: NnefOperation) -> Iterator[NnefOperation]:
        """Yield what stands for an operation."""
        operands = _operands(operation)
        if operands is None or operands[1] not in self.widths or operands[0] in self.widths:
            yield operation
            return
        rank = str(attribute(operation, "expr")).index(",")
        bounds = _bounds(self.widths[operands[1]], self.piece)
        for name, axis in zip(operands, (rank - 1, 1), strict=True):
            if name not in self.cut:
                self.cut[name] = tuple(self.names.take(f"{name}_{number}") for number in range(len(bounds)))
                for part, (begin, end) in zip(self.cut[name], bounds, strict=True):
                    yield _slice(name, part, axis, begin, end, operation)
        yield from self._summed(operation, list(zip(*(self.cut[name] for name in operands), strict=True)))

    def _summed(self, operation: NnefOperation, pairs: list[tuple[str, ...]]) -> Iterator[NnefOperation]:
        (result,) = operation.outputs
        total = ""
        for number, pair in enumerate(pairs):
            product = self.names.take(f"{result}_product_{number}")
            operands = (ArrayLiteral(tuple(map(Reference, pair))), *operation.inputs[1:])
            yield replace(operation, inputs=operands, outputs=(product,))
            if not total:
                total = product
                continue
            name = result if number == len(pairs) - 1 else self.names.take(f"{result}_sum_{number}")
            terms = (Reference(total), Reference(product))
            yield NnefOperation("add", terms, (), (name,), operation.block, operation.note)
            total = name


def _operands(operation: NnefOperation) -> tuple[str, str] | None:
    """Return what a linear layer multiplies, values and matrix; None where an operation is none, or does not sum in f32."""
    if operation.operator != "tract_core_einsum" or attribute(operation, "acc") != _FULL or not operation.inputs:
        return None
    both = operation.inputs[0]
    names = (
        [each.name for each in both.elements if isinstance(each, Reference)] if isinstance(both, ArrayLiteral) else []
    )
    left, _, rest = str(attribute(operation, "expr")).partition(",")
    right, _, result = rest.partition("->")
    linear = len(names) == 2 and len(right) == 2 and result == left[:-1] + right[0] and left[-1:] == right[1]
    return (names[0], names[1]) if linear else None


def _bounds(width: int, piece: int) -> list[tuple[int, int]]:
    """Return where parts begin and end: as few as there can be, of equal length but for the last."""
    count = -(-width // piece)
    length = -(-width // count)
    return [(begin, min(begin + length, width)) for begin in range(0, width, length)]


def _slice(name: str, part: str, axis: int, begin: int, end: int, near: NnefOperation) -> NnefOperation:
    attributes = tuple((key, ArrayLiteral((value,))) for key, value in (("axes", axis), ("begin", begin), ("end", end)))
    return NnefOperation("slice", (Reference(name),), attributes, (part,), near.block)


__all__ = ["MEASURED", "LongReductions", "split_long_reductions"]

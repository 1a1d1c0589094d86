"""The order of `graph.nnef`: operations of one module stand together, so that each module is one block.

Execution order, with two liberties: what a module's leaf children can already compute comes before the module's own next
step, and what depends on stored tensors only stands where it is first read. tract orders the evaluation itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from generic_export.nnef.graph import DimLiteral, NnefGraph, NnefOperation, references


def group_by_module(graph: NnefGraph) -> NnefGraph:
    """Return the graph with its operations regrouped; externals keep their place at the top, in order."""
    externals = tuple(op for op in graph.operations if op.operator == "tract_core_external")
    others = [op for op in graph.operations if op.operator != "tract_core_external"]
    lazy = _constant_operations(others)
    scheduled = _scheduled([op for op in others if op.outputs[0] not in lazy])
    return replace(graph, operations=externals + tuple(_with_constants(scheduled, lazy, graph.outputs, others)))


def _constant_operations(operations: Sequence[NnefOperation]) -> dict[str, NnefOperation]:
    """Return, by output, the one-output operations that depend on stored tensors and literals only."""
    constant: dict[str, NnefOperation] = {}
    for op in operations:
        reads = references(op)
        from_storage = op.operator == "variable" or bool(reads)
        if len(op.outputs) == 1 and from_storage and all(name in constant for name in reads) and not _reads_size(op):
            constant[op.outputs[0]] = op
    return constant


def _reads_size(operation: NnefOperation) -> bool:
    return any(isinstance(argument, DimLiteral) for argument in operation.inputs)


def _with_constants(
    scheduled: Sequence[NnefOperation],
    lazy: dict[str, NnefOperation],
    outputs: Sequence[str],
    original: Sequence[NnefOperation],
) -> list[NnefOperation]:
    """Put each constant operation just before its first reader, in the reader's block."""
    waiting = dict(lazy)
    ordered: list[NnefOperation] = []

    def place(name: str, reader: NnefOperation) -> None:
        constant = waiting.pop(name, None)
        if constant is not None:
            for source in references(constant):
                place(source, reader)
            ordered.append(replace(constant, block=reader.block))

    for op in scheduled:
        for name in references(op):
            place(name, op)
        ordered.append(op)
    for op in original:
        if op.outputs[0] in waiting and op.outputs[0] in outputs:
            place(op.outputs[0], op)
    return ordered


def _scheduled(operations: Sequence[NnefOperation]) -> list[NnefOperation]:
    maker = {name: index for index, op in enumerate(operations) for name in op.outputs}
    needs = ({maker[name] for name in references(op) if name in maker} for op in operations)
    sorter = TopologicalSorter(dict(enumerate(needs)))
    sorter.prepare()
    ready = _ReadyOperations(operations)
    ordered: list[NnefOperation] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            ready.add(index)
        chosen = ready.take()
        ordered.append(operations[chosen])
        sorter.done(chosen)
    return ordered


class _ReadyOperations:
    """The operations whose inputs are all placed; hands them out in the order described at the top."""

    def __init__(self, operations: Sequence[NnefOperation]) -> None:
        self._paths = [op.block.path for op in operations]
        inner = {path[:index] for path in self._paths for index, char in enumerate(path) if char == "."}
        self._leaves = set(self._paths) - inner
        self._all: list[int] = []
        self._of_leaf_children: dict[str, list[int]] = {}
        self._taken: set[int] = set()

    def add(self, index: int) -> None:
        heapq.heappush(self._all, index)
        path = self._paths[index]
        if path in self._leaves and "." in path:
            heapq.heappush(self._of_leaf_children.setdefault(path.rsplit(".", 1)[0], []), index)

    def take(self) -> int:
        """Return the next one; there must be one."""
        self._first(self._all)
        first = self._all[0]
        child = self._first(self._of_leaf_children.get(self._paths[first], []))
        chosen = first if child is None else child
        self._taken.add(chosen)
        return chosen

    def _first(self, heap: list[int]) -> int | None:
        while heap and heap[0] in self._taken:
            heapq.heappop(heap)
        return heap[0] if heap else None

"""Blocks that are a form of the file only: the engine makes f16 of them when it loads the archive.

In: a document whose products read matrices in blocks. Out: one in which they read all rows of them, gathered as f16. tract folds
a gather of a constant by a constant away at load, and then multiplies by its kernels for f16 (tract 0.23.9: on x86 a product
in blocks goes token by token, docs/engine-notes.md).
"""

from __future__ import annotations

from dataclasses import replace

from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import DimLiteral, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.rewriting import FreeNames, attribute, renamed


def unpack_blocks(graph: NnefGraph) -> NnefGraph:
    """Return the graph whose products of matrices in blocks are products of f16; experts and kernels stay as they are."""
    rows = {
        variable.label: variable.shape[0]
        for variable in graph.variables
        if variable.dtype in BLOCK_FORMATS and len(variable.shape) == 2
    }
    blocks = {
        op.outputs[0]: rows[str(attribute(op, "label"))]
        for op in graph.operations
        if op.operator == "variable" and attribute(op, "label") in rows
    }
    names = FreeNames(graph)
    unpacked: dict[str, str] = {}
    operations: list[NnefOperation] = []
    for op in graph.operations:
        read = [name for name in dict.fromkeys(references(op)) if name in blocks and op.operator == "tract_core_einsum"]
        for name in read:
            if name not in unpacked:
                unpacked[name] = names.take(f"{name}_unpacked")
                operations += _all_rows(name, unpacked[name], blocks[name], names, op)
        operations.append(renamed(op, {name: unpacked[name] for name in read}))
    return replace(graph, operations=tuple(operations))


def _all_rows(name: str, result: str, count: int, names: FreeNames, near: NnefOperation) -> list[NnefOperation]:
    """Return the gather of every row of a matrix, as f16."""
    places = names.take(f"{name}_rows")
    numbers = (DimLiteral("0"), DimLiteral(str(count)), DimLiteral("1"))
    attributes = (("axis", 0), ("datum_type", "f16"))
    return [
        NnefOperation("tract_core_range", numbers, (), (places,), block=near.block, note=f"i64 [{count}]"),
        NnefOperation(
            "tract_core_gather",
            (Reference(name), Reference(places)),
            attributes,
            (result,),
            block=near.block,
            note="f16",
        ),
    ]

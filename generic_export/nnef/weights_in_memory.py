"""Weights that are wider in memory than in the file: the engine makes f16 or f32 of them when it loads the archive.

In: a document whose products read matrices in f16 or in blocks. Out: one in which they read those cast, or all rows of them
gathered. tract folds both away at load, as it does with whatever depends on constants alone, and then multiplies by its kernels for
the wider type (tract 0.23.9: on x86 a product in blocks goes token by token, and only f32 has kernels for AVX-512;
docs/contributing/engine-facts.md#q4_0-products-on-x86).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import DimLiteral, NnefGraph, NnefOperation, NnefVariable, Reference, references
from generic_export.nnef.rewriting import FreeNames, attribute, cast_operation, renamed, retyped_note

_HALF, _FULL = "f16", "f32"


def widen_weights(graph: NnefGraph, dtype: str, kept: Collection[str] = ()) -> NnefGraph:
    """Return the graph whose products read matrices in a wider type; experts and kernels stay as they are.

    A weight that is stored as the sum of two (nnef/remainders.py) is added up first, and multiplied once.

    A product that gives f16 (nnef/rounding_products.py) does not read f32: no fast kernel for that would round.

    Args:
        graph: the document.
        dtype: `f16` for what lies in blocks, or `f32` for what lies in f16, too.
        kept: parameters that are read as they are stored, one product with few rows each (a head).
    """
    stored = {variable.label: variable for variable in graph.variables if _is_widened(variable, dtype, kept)}
    variables = {
        op.outputs[0]: stored[str(attribute(op, "label"))]
        for op in graph.operations
        if op.operator == "variable" and attribute(op, "label") in stored
    }
    names = FreeNames(graph)
    wider: dict[str, str] = {}
    operations: list[NnefOperation] = []
    for op in graph.operations:
        widens = op.operator == "tract_core_einsum" and (dtype == _HALF or attribute(op, "acc") == _FULL)
        read = [name for name in dict.fromkeys(references(op)) if name in variables and widens]
        for name in read:
            if name not in wider:
                wider[name] = names.take(f"{name}_{dtype}")
                operations += _widened(variables[name], name, wider[name], dtype, names, op)
        operations.append(renamed(op, {name: wider[name] for name in read}))
    labels = {each.label: name for name, each in variables.items()}
    rests = {
        wider[name]: wider[labels[each.residual_of]]
        for name, each in variables.items()
        if name in wider and labels.get(each.residual_of) in wider
    }
    return replace(graph, operations=tuple(_with_one_product(operations, rests, names)))


def _with_one_product(
    operations: Sequence[NnefOperation], rests: Mapping[str, str], names: FreeNames
) -> Iterator[NnefOperation]:
    """Yield operations in which a weight that is stored as the sum of two is added up at load, and multiplied once.

    Args:
        operations: with a product of each of the two (nnef/remainders.py).
        rests: what is read of the second -> what is read of the first.
        names: what the document does not have yet.
    """
    makers = {op.outputs[0]: op for op in operations}
    sums: dict[str, tuple[NnefOperation, str]] = {}
    for op in operations:
        terms = [makers[name] for name in references(op) if name in makers] if op.operator == "add" else []
        if len(terms) == 2:
            rest = next((name for name in references(terms[1]) if name in rests), None)
            if rest and replace(renamed(terms[0], {rests[rest]: rest}), outputs=terms[1].outputs) == terms[1]:
                sums[op.outputs[0]] = terms[0], rest
    dropped = {name for op in operations if op.outputs[0] in sums for name in references(op)}
    for op in operations:
        if op.outputs[0] in sums:
            product, rest = sums[op.outputs[0]]
            total = names.take(f"{rests[rest]}_total")
            made = makers[rest]
            yield NnefOperation("add", (Reference(rests[rest]), Reference(rest)), (), (total,), op.block, made.note)
            yield replace(renamed(product, {rests[rest]: total}), outputs=op.outputs)
        elif op.outputs[0] not in dropped:
            yield op


def _is_widened(variable: NnefVariable, dtype: str, kept: Collection[str]) -> bool:
    narrow = variable.dtype in BLOCK_FORMATS or (dtype == _FULL and variable.dtype == _HALF)
    return narrow and len(variable.shape) == 2 and variable.parameter not in kept


def _widened(
    variable: NnefVariable, name: str, result: str, dtype: str, names: FreeNames, near: NnefOperation
) -> list[NnefOperation]:
    """Return what makes a matrix of a wider type of a stored one."""
    note = retyped_note(f"{variable.dtype} [{','.join(map(str, variable.shape))}]", dtype)
    if variable.dtype == _HALF:
        return [cast_operation(name, result, dtype, near, note)]
    places = names.take(f"{name}_rows")
    rows = variable.shape[0]
    numbers = (DimLiteral("0"), DimLiteral(str(rows)), DimLiteral("1"))
    attributes = (("axis", 0), ("datum_type", dtype))
    return [
        NnefOperation("tract_core_range", numbers, (), (places,), block=near.block, note=f"i64 [{rows}]"),
        NnefOperation(
            "tract_core_gather", (Reference(name), Reference(places)), attributes, (result,), near.block, note
        ),
    ]

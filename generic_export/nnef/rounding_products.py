"""Products that round their sums to f16 themselves, instead of a cast behind them.

In: a finished document. Out: the same without the casts to f16 of what products of f16 or Q4_0 weights with f32 values give.

Whatever the machine, the engine's kernels for such operands sum in f32, and they can store f16 (tract 0.23.9, `tract-linalg`:
those that take f32 activations beside panels of f16 or Q4_0 all declare `store(f16)`). So the bytes are the same, and the cast is
gone, which on Intel is a hundred times as slow behind a product as elsewhere
(docs/contributing/engine-facts.md#conversions-behind-a-product).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import NnefGraph, NnefOperation, references
from generic_export.nnef.half_storage import is_mixed_product
from generic_export.nnef.rewriting import attribute, renamed_throughout, retyped_note, with_attribute

_HALF, _FULL = "f16", "f32"
_VIEWS = frozenset({"reshape", "squeeze", "transpose", "unsqueeze"})
_STORED = frozenset({_HALF, *BLOCK_FORMATS})


def round_in_products(graph: NnefGraph) -> NnefGraph:
    """Return the document whose products give f16 where nothing but a cast, and views before it, reads what they give."""
    makers = {name: operation for operation in graph.operations for name in operation.outputs}
    readers = Counter(name for operation in graph.operations for name in references(operation))
    readers.update(graph.outputs)
    types = float_types(graph)
    names: dict[str, str] = {}
    halved: set[str] = set()
    for operation in graph.operations:
        chain = _rounded_chain(operation, makers, readers, types)
        if chain:
            halved.update(chain)
            names |= _joined(chain[0], operation.outputs[0], graph.outputs)
    kept = (operation for operation in graph.operations if not _is_gone(operation, halved))
    operations = (_in_half(operation) if halved & {*operation.outputs} else operation for operation in kept)
    return replace(graph, operations=tuple(renamed_throughout(operation, names) for operation in operations))


def float_types(graph: NnefGraph) -> dict[str, str]:
    """Return the element type of each identifier that holds floats; of stored blocks, the name of their format.

    What compares or counts is given the type of what it reads: nobody asks for that of such a result.
    """
    stored = {variable.label: variable.dtype for variable in graph.variables}
    types: dict[str, str] = {}
    for operation in graph.operations:
        found = _float_type(operation, stored, types)
        if found is not None:
            types.update(dict.fromkeys(operation.outputs, found))
    return types


def _float_type(operation: NnefOperation, stored: Mapping[str, str], types: Mapping[str, str]) -> str | None:
    if operation.operator == "variable":
        return stored.get(str(attribute(operation, "label")))
    for said in ("datum_type", "to", "acc"):
        value = attribute(operation, said)
        if isinstance(value, str):
            return value
    return next((types[name] for name in references(operation) if name in types), None)


def _rounded_chain(
    operation: NnefOperation,
    makers: Mapping[str, NnefOperation],
    readers: Mapping[str, int],
    types: Mapping[str, str],
) -> list[str]:
    """Return what becomes f16 when a cast goes, from what it reads back to the product; nothing where it has to stay."""
    if operation.operator != "tract_core_cast" or attribute(operation, "to") != _HALF:
        return []
    chain = references(operation)
    while len(chain) and readers[chain[-1]] == 1 and chain[-1] in makers:
        maker = makers[chain[-1]]
        if maker.operator not in _VIEWS:
            return chain if _rounds(maker, types) else []
        chain.append(references(maker)[0])
    return []


def _rounds(product: NnefOperation, types: Mapping[str, str]) -> bool:
    """Say whether an operation multiplies f32 values with f16 or blocks, and sums in f32."""
    read = references(product)
    narrow = [name for name in read if types.get(name) in _STORED]
    return is_mixed_product(product, narrow) and _FULL in map(types.get, read)


def _joined(rounded: str, cast: str, outputs: tuple[str, ...]) -> dict[str, str]:
    """Return the one name that what a cast read and what it made have from now on: that of the output, if it was one."""
    return {rounded: cast} if cast in outputs else {cast: rounded}


def _is_gone(operation: NnefOperation, halved: set[str]) -> bool:
    """Say whether an operation is a cast of what is f16 already."""
    is_cast = operation.operator == "tract_core_cast" and attribute(operation, "to") == _HALF
    return is_cast and not halved.isdisjoint(references(operation))


def _in_half(operation: NnefOperation) -> NnefOperation:
    noted = replace(operation, note=retyped_note(operation.note, _HALF))
    return with_attribute(noted, "acc", _HALF)

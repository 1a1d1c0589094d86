"""Products that round to f16 themselves, instead of a cast behind them.

In: a finished document. Out: the same without the casts to f16 of what products of f16 or Q4_0 weights with f32 values give.
`IdentityProducts` rounds what no product gives, such as keys after their rotary embedding.

Whatever the machine, the engine's kernels for such operands sum in f32, and they can store f16 (tract 0.23.9, `tract-linalg`:
those that take f32 activations beside panels of f16 or Q4_0 all declare `store(f16)`). So the bytes are the same, and the cast is
gone, which on Intel is a hundred times as slow behind a product as elsewhere
(docs/contributing/engine-facts.md#conversions-behind-a-product).
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from generic_export.nnef.dat import BLOCK_FORMATS
from generic_export.nnef.graph import ArrayLiteral, DimLiteral, NnefGraph, NnefOperation, Reference, references
from generic_export.nnef.half_storage import is_mixed_product
from generic_export.nnef.rewriting import (
    FreeNames,
    attribute,
    cast_operation,
    renamed_throughout,
    retyped_note,
    with_attribute,
)

_HALF, _FULL = "f16", "f32"
_VIEWS = frozenset({"reshape", "squeeze", "transpose", "unsqueeze"})
_REPEATS = frozenset({"tile", "tract_core_broadcast"})
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


@dataclass
class RoundedValues:
    """The values of a document that `round_in_products` can have rounded by the product that makes them.

    Attributes:
        graph: before that pass.
    """

    graph: NnefGraph
    _makers: dict[str, NnefOperation] = field(init=False)
    _readers: Counter[str] = field(init=False)
    _types: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._makers = {name: operation for operation in self.graph.operations for name in operation.outputs}
        self._readers = Counter(name for operation in self.graph.operations for name in references(operation))
        self._readers.update(self.graph.outputs)
        self._types = float_types(self.graph)

    def __contains__(self, name: str) -> bool:
        return bool(_chain_to_product(name, self._makers, self._readers, self._types))

    def is_repeated(self, name: str) -> bool:
        """Say whether a value is a view of a broadcast one: tract 0.23.9 fails to load a product behind those (Falcon's values)."""
        maker = self._makers.get(name)
        while maker is not None and maker.operator in _VIEWS:
            maker = self._makers.get(references(maker)[0])
        return maker is not None and maker.operator in _REPEATS


@dataclass
class IdentityProducts:
    """Rounds values to f16 by a product with the identity matrix, which is made once for each width.

    The engine folds the matrix when it loads the archive, up to widths of 1,448 (4 MiB). A value that is no number, or
    infinite in f32, spreads over its row; the others are rounded as a cast rounds them.

    Attributes:
        names: what the document does not have yet.
        made: width -> the matrix.
    """

    names: FreeNames
    made: dict[int, str] = field(default_factory=dict)

    def rounded(
        self, source: str, result: str, rank: int, width: int, near: NnefOperation, note: str = ""
    ) -> Iterator[NnefOperation]:
        """Yield the product, and the matrix before its first use.

        Args:
            source: f32 [..., width].
            result: name of the f16 value of the same shape.
            rank: of both.
            width: size of the last axis.
            near: names the block.
            note: what the reader is told of the result.
        """
        if width not in self.made:
            yield from self._matrix(width, near)
        axes = string.ascii_lowercase[:rank]
        inner = axes[-1]
        outer = string.ascii_lowercase[rank]
        expression = f"{axes},{outer}{inner}->{axes[:-1]}{outer}"
        operands = ArrayLiteral((Reference(source), Reference(self.made[width])))
        attributes = (("expr", expression), ("acc", _HALF))
        yield NnefOperation("tract_core_einsum", (operands,), attributes, (result,), block=near.block, note=note)

    def _matrix(self, width: int, near: NnefOperation) -> Iterator[NnefOperation]:
        name = self.made[width] = self.names.take(f"identity_{width}")
        places, rows, columns, equal = (
            self.names.take(f"{name}_{part}") for part in ("range", "rows", "columns", "equal")
        )
        numbers = (DimLiteral("0"), DimLiteral(str(width)), DimLiteral("1"))
        block = near.block
        yield NnefOperation("tract_core_range", numbers, (), (places,), block, f"i64 [{width}]")
        for axis, result in ((1, rows), (0, columns)):
            axes = (("axes", ArrayLiteral((axis,))),)
            shape = f"{width},1" if axis else f"1,{width}"
            yield NnefOperation("unsqueeze", (Reference(places),), axes, (result,), block, f"i64 [{shape}]")
        sides = (Reference(rows), Reference(columns))
        yield NnefOperation("eq", sides, (), (equal,), block, f"bool [{width},{width}]")
        yield cast_operation(equal, name, _HALF, near, f"f16 [{width},{width}]")


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
    read = references(operation)
    return _chain_to_product(read[0], makers, readers, types) if read else []


def _chain_to_product(
    name: str, makers: Mapping[str, NnefOperation], readers: Mapping[str, int], types: Mapping[str, str]
) -> list[str]:
    """Return the views from a value back to the product that makes it; nothing where that cannot round it."""
    chain = [name]
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

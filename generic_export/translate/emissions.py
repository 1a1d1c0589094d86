"""From emissions, which know values by number, to NNEF operations, which know them by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from generic_export.nnef.dtypes import tract_dtype
from generic_export.nnef.graph import Argument, ArrayLiteral, NnefOperation, Reference, TupleLiteral
from generic_export.torch_graph.dims import dim_text
from generic_export.translate.value import Emission, Value, values_in

_PREFIXES = ("tract_transformers_", "tract_core_")


def reachable(emissions: Sequence[Emission], outputs: Sequence[Value], kept: set[int]) -> list[Emission]:
    """Return the emissions that an output depends on, and those that make a value among `kept`."""
    needed = {value.number for value in outputs} | kept
    live: list[Emission] = []
    for emission in reversed(emissions):
        if any(value.number in needed for value in emission.outputs):
            live.append(emission)
            needed.update(value.number for value in values_in(emission.inputs))
            needed.update(value.number for value in values_in([value for _, value in emission.attributes]))
    return live[::-1]


def operation_of(emission: Emission, names: Mapping[int, str]) -> NnefOperation:
    """Return an emission as an operation, with a note that says what it makes."""
    return NnefOperation(
        operator=emission.operator,
        inputs=tuple(_argument(item, names) for item in emission.inputs),
        attributes=tuple((name, _argument(item, names)) for name, item in emission.attributes),
        outputs=tuple(names[value.number] for value in emission.outputs),
        block=emission.block,
        note=", ".join(f"{tract_dtype(value.dtype)} {shape_text(value.shape)}" for value in emission.outputs),
        generic_type=emission.generic_type,
    )


def _argument(item: Any, names: Mapping[int, str]) -> Argument:
    if isinstance(item, Value):
        return item.constant if item.literal else Reference(names[item.number])  # type: ignore[return-value]
    if isinstance(item, TupleLiteral):
        return TupleLiteral(tuple(_argument(element, names) for element in item.elements))
    if isinstance(item, (tuple, ArrayLiteral)):
        elements = item if isinstance(item, tuple) else item.elements
        return ArrayLiteral(tuple(_argument(element, names) for element in elements))
    return item  # type: ignore[no-any-return]


def inner_name(emission: Emission) -> str:
    """Return the dotted name of a value that no module's result is: who asked for it, and what it is."""
    if emission.operator == "variable":
        return emission.hint
    short = emission.operator
    for prefix in _PREFIXES:
        short = short.removeprefix(prefix)
    return f"{emission.hint}.{short}"


def shape_text(shape: Sequence[Any]) -> str:
    """Return a shape as messages and notes show it."""
    return "[" + ",".join(dim_text(dim) for dim in shape) + "]"

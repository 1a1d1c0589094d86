"""What a run of a graph reads and computes at the least: weights and caches in bytes, products in operations.

In: an archive's outline, the sizes of what it stores, the sizes of a run. Out: bytes by identifier, operations by engine node.
Activations are not counted: a decoding step moves a thousandth of what its weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from generic_export.errors import OptionError
from generic_export.inference_target.tract.engines.engine import EngineNode
from generic_export.inference_target.tract.engines.measure import evaluate
from generic_export.nnef.graph import Argument, ArrayLiteral, Reference, TupleLiteral
from generic_export.read.contents import StoredTensor
from generic_export.read.outline import GraphOutline, Invocation

# What the engine does to a stored tensor once, when it loads.
_FOLDED = {"reshape", "transpose", "unsqueeze", "squeeze", "tract_core_cast"}
_MIXTURE = "tract_moe_ffn"
_GATHERS = {"tract_core_gather", "gather"}
_TYPES_SAID = {"tract_core_cast": "to", "tract_core_gather": "datum_type"}
_VALUE_BYTES = {"f16": 2, "f32": 4, "f64": 8}


def bytes_read(outline: GraphOutline, tensors: Iterable[StoredTensor], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes of weights and caches that each assignment reads, by its first identifier.

    Args:
        outline: of the graph.
        tensors: what the archive stores.
        sizes: value of each symbol.
    """
    whole = _stored_bytes(outline, tensors) | cache_bytes(outline, sizes) | _widened_bytes(outline)
    shapes = {variable.name: [int(dim) for dim in variable.shape] for variable in outline.variables}
    read: dict[str, float] = {}
    for invocation in outline.invocations:
        operands = list(_references(value for _, value in invocation.arguments))
        size = sum(whole.get(name, 0.0) for name in operands)
        if not size or invocation.operator in _GATHERS or invocation.outputs[0] in whole:
            continue  # a gather reads a row for each token, which is nothing beside a product
        if invocation.operator in _FOLDED and len(operands) == 1:
            whole[invocation.outputs[0]] = size
        elif invocation.operator == "slice" and operands[0] in shapes:
            whole[invocation.outputs[0]] = size * _share_cut(invocation, shapes[operands[0]])
        else:
            read[invocation.outputs[0]] = size * _share_read(invocation, outline, sizes)
    return read


def _share_cut(invocation: Invocation, shape: Sequence[int]) -> float:
    """Return the part of a stored tensor that a slice takes (nnef/long_reductions.py); all of it where sizes are no numbers."""
    axes, begin, end = (invocation.argument(name) for name in ("axes", "begin", "end"))
    if not all(isinstance(each, ArrayLiteral) for each in (axes, begin, end)):
        return 1.0
    numbers = [each.elements[0] for each in (axes, begin, end) if isinstance(each, ArrayLiteral)]
    axis, first, last = (each if isinstance(each, int) else 0 for each in numbers)
    return (last - first) / shape[axis] if last > first else 1.0


def _share_read(invocation: Invocation, outline: GraphOutline, sizes: Mapping[str, int]) -> float:
    """Return how much of its operands a call reads: of a mixture, at most the experts that its tokens choose."""
    chosen = invocation.argument("k")
    operands = set(_references(value for _, value in invocation.arguments))
    stored = next((variable for variable in outline.variables if variable.name in operands), None)
    if invocation.operator != _MIXTURE or not isinstance(chosen, int) or stored is None:
        return 1.0
    return min(1.0, chosen * sizes.get("S", 1) / int(stored.shape[0]))


def consumers(outline: GraphOutline) -> dict[str, str]:
    """Return, by identifier, the first assignment that reads it; an empty name where none does."""
    found = dict.fromkeys((name for invocation in outline.invocations for name in invocation.outputs), "")
    for invocation in outline.invocations:
        for name in _references(value for _, value in invocation.arguments):
            if found.get(name) == "":
                found[name] = invocation.outputs[0]
    return found


def cache_concats(outline: GraphOutline) -> dict[str, Invocation]:
    """Return the concatenations that make an output of an input, by identifier: the growing caches."""
    inputs = {external.name for external in outline.externals}
    return {
        invocation.outputs[0]: invocation
        for invocation in outline.invocations
        if invocation.operator == "concat"
        and invocation.outputs[0] in outline.outputs
        and inputs.intersection(_references(value for _, value in invocation.arguments))
    }


def cache_bytes(outline: GraphOutline, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes of each growing cache after the run, by the identifier of its concatenation."""
    shapes = {external.name: external for external in outline.externals}
    grown = dict(sizes) | {"P": sizes.get("P", 0) + sizes.get("S", 0)}
    found: dict[str, float] = {}
    for name, invocation in cache_concats(outline).items():
        external = next(
            shapes[each] for each in _references(value for _, value in invocation.arguments) if each in shapes
        )
        elements = prod(evaluate(dim, grown) for dim in external.shape)
        found[name] = elements * _VALUE_BYTES.get(external.datum_type, 4)
    return found


def flops(node: EngineNode, sizes: Mapping[str, int]) -> float:
    """Return the operations of a node that the engine counts: two for a multiplication with an addition."""
    total = 0.0
    for kind, count in node.costs:
        if not kind.startswith(("FMA", "Div")):
            continue
        try:
            total += (2 if kind.startswith("FMA") else 1) * evaluate(count, sizes)
        except OptionError:  # a dimension that the engine made up itself
            continue
    return total


def _stored_bytes(outline: GraphOutline, tensors: Iterable[StoredTensor]) -> dict[str, float]:
    by_label = {tensor.label: tensor.data_bytes for tensor in tensors}
    return {variable.name: float(by_label.get(variable.label, 0)) for variable in outline.variables}


def _widened_bytes(outline: GraphOutline) -> dict[str, float]:
    """Return the bytes of what the engine makes of weights at load: a matrix cast, or all rows of it gathered."""
    elements = {variable.name: prod(map(int, variable.shape)) for variable in outline.variables}
    found: dict[str, float] = {}
    ranges: set[str] = set()
    for invocation in outline.invocations:
        operands = list(_references(value for _, value in invocation.arguments))
        if invocation.operator == "tract_core_range" and not operands:
            ranges.add(invocation.outputs[0])
        elif operands and operands[0] in elements and ranges.issuperset(operands[1:]):
            dtype = invocation.argument(_TYPES_SAID.get(invocation.operator, ""))
            if dtype is not None:
                found[invocation.outputs[0]] = float(_VALUE_BYTES.get(str(dtype), 4) * elements[operands[0]])
    return found


def _references(arguments: Iterable[Argument]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, Reference):
            yield argument.name
        elif isinstance(argument, ArrayLiteral | TupleLiteral):
            yield from _references(argument.elements)

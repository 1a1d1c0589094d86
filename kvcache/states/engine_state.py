"""Keys and values as state of the engine from the start: the graph takes token ids and gives logits, nothing else.

In: a finished document and its states. Out: the document with `tract_transformers_dyn_kv_cache`, or the quantised form of it, in
place of each input, concatenation and output (docs/contributing/engine-facts.md#stateful-caches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from generic_export.errors import CaptureError
from generic_export.nnef.graph import Argument, ArrayLiteral, DimLiteral, NnefGraph, NnefOperation, Reference
from kvcache.states.tensors import BATCH, PAST, StateTensor

_PLAIN = "tract_transformers_dyn_kv_cache"
_QUANTISED = "tract_transformers_quantized_dyn_kv_cache"
_REGISTRY = "tract_transformers"
_NEW = "S"


def engine_held(graph: NnefGraph, states: Sequence[StateTensor], bits: int | None = None) -> NnefGraph:
    """Return the document with its states kept by the engine.

    Args:
        graph: takes each state as an input, and gives it grown by one concatenation as an output; the batch is 1.
        states: all of them.
        bits: 8 or 4 keeps them quantised: keys per channel, values per token, the first four tokens in f32. None keeps them
            as they are.

    Raises:
        CaptureError: a state has a fixed size, or another form than a concatenation of past and new positions.
    """
    fixed = [state.input_name for state in states if not state.grows]
    if fixed:
        raise CaptureError(
            f"the engine cannot keep {fixed[0]} itself: tract's only state that lasts from turn to turn grows with the tokens.",
            "Export without --stateful and --kv-cache: states of fixed size are inputs and outputs then.",
        )
    by_output = {state.output_name: state for state in states}
    externals = {state.input_name for state in states}
    operations = tuple(
        _cached(operation, by_output[operation.outputs[0]], bits) if operation.outputs[0] in by_output else operation
        for operation in graph.operations
        if operation.outputs[0] not in externals
    )
    return replace(
        graph,
        inputs=tuple(name for name in graph.inputs if name not in externals),
        outputs=tuple(name for name in graph.outputs if name not in by_output),
        operations=operations,
        registries=tuple(dict.fromkeys((*graph.registries, _REGISTRY))),
        origins=tuple(origin for origin in graph.origins if origin[0] not in externals | by_output.keys()),
    )


def _cached(operation: NnefOperation, state: StateTensor, bits: int | None) -> NnefOperation:
    parts = operation.inputs[0] if operation.inputs else None
    grown = operation.operator == "concat" and isinstance(parts, ArrayLiteral) and len(parts.elements) == 2
    if not grown or parts.elements[0] != Reference(state.input_name):  # type: ignore[union-attr]
        raise CaptureError(
            f"{state.output_name} is made by {operation.operator}, not by appending to {state.input_name}: the engine cannot keep "
            "it itself.",
            "Export without --stateful and --kv-cache.",
        )
    if bits is not None and (len(state.shape) != 4 or state.axis != 2):
        raise CaptureError(
            f"{state.input_name} has the shape {list(state.shape)}: tract quantises caches [B, H, P, D] only.",
            "Export without --kv-cache.",
        )
    new = parts.elements[1]  # type: ignore[union-attr]
    attributes: list[tuple[str, Argument]] = [("name", state.input_name), ("axis", state.axis or 0)]
    if bits is not None:
        attributes += [("bits", bits), ("per_channel", int(state.kind == "cache_key"))]
    attributes += [
        ("datum_type", state.dtype),
        ("past_sequence_shape", _shape(state, PAST)),
        ("input_sequence_shape", _shape(state, _NEW)),
    ]
    operator = _PLAIN if bits is None else _QUANTISED
    return replace(operation, operator=operator, inputs=(new,), attributes=tuple(attributes))


def _shape(state: StateTensor, length: str) -> ArrayLiteral:
    values: dict[int | str, Argument] = {BATCH: 1, PAST: DimLiteral(length)}
    return ArrayLiteral(tuple(values.get(dim, dim) for dim in state.shape))

"""Experts in the engine's words: `tract_moe_ffn` with a router made outside it, and products over all experts.

In: calls of `t2n::experts` and `t2n::grouped_linear`. Out: NNEF operations, and stored tensors that are parts of parameters, since
blocks can be sliced while they stream but not in a graph (docs/contributing/engine-facts.md#where-blocks-may-be-used).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from generic_export.nnef.graph import Argument, ArrayLiteral
from generic_export.translate.builder import Emission, NnefBuilder, Value, ints
from generic_export.translate.registry import translates
from generic_export.weights.part import TensorPart
from kvcache.experts.families import explicit_experts

_GROUPED_PRODUCTS = {2: "tk,enk->etn", 3: "etk,enk->etn", 4: "betk,enk->betn"}  # by the rank of what is multiplied
_GROUP = 32  # a block of weights; the router's columns fill whole ones


@translates(torch.ops.t2n.grouped_linear.default)
def translate_grouped_linear(b: NnefBuilder, input: Value, weight: Value, role: str | None = None) -> Value:
    """t2n::grouped_linear(Tensor input, Tensor weight, str? role=None) -> Tensor"""
    whole = _stored(b, weight, role or "grouped_{}", weight.shape)
    return b.product(_GROUPED_PRODUCTS[input.rank], [input, weight if whole is None else whole])


@translates(torch.ops.t2n.experts.default)
def translate_experts(
    b: NnefBuilder,
    hidden: Value,
    index: Value,
    weights: Value,
    gate: Value,
    up: Value | None,
    down: Value,
    gate_bias: Value | None,
    up_bias: Value | None,
    down_bias: Value | None,
    activation: str,
    alpha: float,
    limit: float | None,
) -> Value:
    """t2n::experts(Tensor hidden, Tensor index, Tensor weights, Tensor gate, Tensor? up, Tensor down, ...) -> Tensor

    tract_moe_ffn computes router logits itself, from the very tensor that the experts read. Ours come from the graph: they
    are appended to that tensor as further channels, which the engine's router picks out and the experts' zeros ignore.
    """
    number, width, channels = (int(size) for size in gate.shape)
    columns = -(-(number + 1) // _GROUP) * _GROUP
    wide = channels + columns
    tokens = b.concat([hidden, _routing(b, index, b.cast(weights, hidden.dtype), columns)], 1)
    operands = [
        tokens,
        _router(b, number, channels, wide),
        _padded(b, gate, "gate_proj", (number, width, wide)),
        _padded(b, down, "down_proj", (number, wide, width)),
    ]
    if up is not None:
        operands.append(_padded(b, up, "up_proj", (number, width, wide)))
    attributes: dict[str, Any] = {}
    for name, bias, role, size in (
        ("w1_bias", gate_bias, "gate_bias", width),
        ("w3_bias", up_bias, "up_bias", width),
        ("w2_bias", down_bias, "down_bias", wide),
    ):
        if bias is not None:
            attributes[name] = _padded(b, bias, role, (number, size))
    attributes |= {"k": int(index.shape[1]), "activation": activation, "gate": "raw", "expert_layout": "linear"}
    if limit is not None:
        attributes |= {"act_alpha": float(alpha), "act_limit": float(limit)}
    shape = (hidden.shape[0], wide)
    result = b.emit("tract_moe_ffn", operands, shape=shape, dtype=hidden.dtype, attributes=attributes)
    return b.slice(result, 1, 0, channels)


def _routing(b: NnefBuilder, index: Value, weights: Value, columns: int) -> Value:
    """[T, columns]: each token's weight for each expert; what stands for no expert falls into a column nobody reads."""
    shape = (index.shape[0], columns)
    empty = b.broadcast(b.unsqueeze(b.materialised(b.scalar(0.0, weights.dtype)), [0, 1]), shape)
    attributes: dict[str, Argument] = {"axis": 1, "reduction": "none"}
    return b.emit(
        "tract_core_scatter_elements",
        [empty, index, weights],
        shape=shape,
        dtype=weights.dtype,
        attributes=attributes,
    )


def _router(b: NnefBuilder, number: int, first: int, width: int) -> Value:
    """[E, width]: row e picks channel `first + e`."""
    places = b.emit("tract_core_range", [first, first + number, 1], shape=(number,), dtype=torch.int64)
    attributes: dict[str, Argument] = {"axis": 1, "dim": width}
    return b.emit("tract_core_one_hot", [places], shape=(number, width), dtype=torch.float32, attributes=attributes)


def _padded(b: NnefBuilder, weight: Value, role: str, shape: tuple[int, ...]) -> Value:
    """Return a weight with zeros for the further channels: stored so, or padded in the graph when it is computed there."""
    stored = _stored(b, weight, f"routed_{role}", shape)
    if stored is not None:
        return stored
    padding = ArrayLiteral(tuple(ints([0, wide - int(size)]) for wide, size in zip(shape, weight.shape, strict=True)))  # type: ignore[arg-type]
    attributes: dict[str, Argument] = {"padding": padding, "border": "constant", "value": 0.0}
    return b.emit("pad", [weight], shape=shape, dtype=weight.dtype, attributes=attributes)


# --- stored tensors that are parts of parameters -----------------------------------------------------


def _stored(b: NnefBuilder, value: Value, role: str, shape: Any) -> Value | None:
    """Return a value as a stored tensor of its own, when it is part of a parameter or all of it; else None.

    `role` is what a part is called, beside its parameter; `{}` stands for the parameter's own name.
    """
    part = stored_part(b, value)
    if part is None:
        return None
    part = replace(part, shape=tuple(int(size) for size in shape))
    if part.is_whole:
        return b.variable(part.parameter, part.shape, value.dtype)
    prefix, _, name = part.parameter.rpartition(".")
    label = role.format(name)
    return b.part(f"{prefix}.{label}" if prefix else label, part, value.dtype)


def stored_part(b: NnefBuilder, value: Value) -> TensorPart | None:
    """Follow views back to the parameter they are of; None when something is computed on the way."""
    steps: list[Emission] = []
    emission = b.maker_of(value)
    while emission is not None and emission.operator != "variable":
        source = emission.inputs[0] if emission.inputs else None
        if emission.operator not in _VIEWS or not isinstance(source, Value):
            return None
        steps.append(emission)
        emission = b.maker_of(source)
    if emission is None or emission.label in b.parts:
        return None
    part = TensorPart.whole(emission.label, tuple(int(size) for size in emission.outputs[0].shape))  # type: ignore[arg-type]
    for step in reversed(steps):
        further = _VIEWS[step.operator](part, step)
        if further is None:
            return None
        part = further
    return part if part.order[0] == 0 else None


def _sliced(part: TensorPart, emission: Emission) -> TensorPart | None:
    attributes = dict(emission.attributes)
    (axis,), (begin,), (end,) = (_numbers(attributes[name]) for name in ("axes", "begin", "end"))
    step = _numbers(attributes["stride"])[0] if "stride" in attributes else 1
    if not all(isinstance(each, int) for each in (begin, end, step)):
        return None
    axis = part.order[int(axis)]
    cuts = list(part.cuts)
    kept = range(*cuts[axis])[slice(begin, end, step)]
    cuts[axis] = (kept.start, kept.stop, kept.step)
    return _resized(replace(part, cuts=tuple(cuts)))


def _transposed(part: TensorPart, emission: Emission) -> TensorPart:
    axes = _numbers(dict(emission.attributes)["axes"])
    return _resized(replace(part, order=tuple(part.order[int(axis)] for axis in axes)))


def _reshaped(part: TensorPart, emission: Emission) -> TensorPart | None:
    if not part.is_whole:
        return None
    return TensorPart.whole(part.parameter, tuple(int(size) for size in emission.outputs[0].shape))  # type: ignore[arg-type]


def _resized(part: TensorPart) -> TensorPart:
    return replace(part, shape=part.inner_shape)


def _numbers(argument: Any) -> tuple[Any, ...]:
    return argument.elements if isinstance(argument, ArrayLiteral) else tuple(argument)


_VIEWS: dict[str, Any] = {"slice": _sliced, "transpose": _transposed, "reshape": _reshaped}

__all__ = ["explicit_experts", "stored_part"]

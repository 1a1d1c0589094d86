"""Rotary position embedding as one operator: recognised in a captured graph, written as `tract_transformers_apply_rope`.

Half-split convention (Su et al. 2021, as in GPT-NeoX and Llama): x * cos + rotate_half(x) * sin.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from generic_export.ops.elementwise import result_dtype
from generic_export.torch_graph.fusion import GraphView
from generic_export.torch_graph.ir import FixedTensorList, TensorVariable, TorchOp
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten

_END_OF_AXIS = 2**62


@torch.library.custom_op("t2n::rotary_embedding", mutates_args=())
def rotary_embedding(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of the last axis.

    Args:
        input: float tensor [..., D], D even.
        cos, sin: float tensors broadcastable to `input`.

    Returns:
        A tensor of the promoted element type, with the shape of `input` broadcast with `cos`.
    """
    first, second = input.chunk(2, dim=-1)
    return input * cos + torch.cat((-second, first), dim=-1) * sin


@rotary_embedding.register_fake
def _(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return input * cos + input * sin


@translates(torch.ops.t2n.rotary_embedding.default)
def translate_rotary_embedding(b: NnefBuilder, input: Value, cos: Value, sin: Value) -> Value:
    """t2n::rotary_embedding(Tensor input, Tensor cos, Tensor sin) -> Tensor"""
    # docs/contributing/engine-facts.md#operators-of-tract_transformers: one element type for the three, one rank,
    # half-split convention only.
    dtype = result_dtype(input, cos, sin)
    operands = [b.align_rank(b.cast(value, dtype), input.rank) for value in (input, cos, sin)]
    return b.emit("tract_transformers_apply_rope", operands, shape=input.shape, dtype=dtype)


def fuse_rotary_embedding(view: GraphView, root: TorchOp) -> TorchOp | None:
    """Replace `x * cos + cat(-x[D/2:], x[:D/2]) * sin` by one `rotary_embedding(x, cos, sin)`.

    Formula: RoFormer (arXiv:2104.09864), in the half-split form of transformers' `apply_rotary_pos_emb`.

    Args:
        view: the graph.
        root: the addition.

    Returns:
        The fused operator, or None if the pattern does not match.
    """
    if root.target is not aten.add.Tensor or root.kwargs:
        return None
    direct, rotated = (view.made_by(argument, aten.mul.Tensor) for argument in root.args)
    if direct is None or rotated is None:
        return None
    for source, cos in (direct.args, direct.args[::-1]):
        for halves, sin in (rotated.args, rotated.args[::-1]):
            if (
                _is_rotate_half(view, halves, source)
                and _broadcasts_onto(cos, source)
                and _broadcasts_onto(sin, source)
            ):
                return replace(root, target=torch.ops.t2n.rotary_embedding.default, args=(source, cos, sin))
    return None


def _broadcasts_onto(table: object, source: TensorVariable) -> bool:
    return isinstance(table, TensorVariable) and table.rank <= source.rank and table.shape[-1] == source.shape[-1]


def _is_rotate_half(view: GraphView, value: object, source: object) -> bool:
    joined = view.made_by(value, aten.cat.default)
    if joined is None or not isinstance(source, TensorVariable):
        return False
    parts, axis = joined.args[0], joined.args[1] if len(joined.args) > 1 else 0
    width = source.shape[-1]
    if not isinstance(parts, FixedTensorList) or len(parts) != 2 or not isinstance(width, int) or width % 2:
        return False
    negated = view.made_by(parts.elements[0], aten.neg.default)
    if axis not in (-1, source.rank - 1) or negated is None:
        return False
    second_half = _last_axis_slice(view, negated.args[0], source)
    first_half = _last_axis_slice(view, parts.elements[1], source)
    return second_half == (width // 2, width) and first_half == (0, width // 2)


def _last_axis_slice(view: GraphView, value: object, source: TensorVariable) -> tuple[int, int] | None:
    """Return the bounds of a step-1 slice of `source` along its last axis."""
    sliced = view.made_by(value, aten.slice.Tensor)
    if sliced is None or len(sliced.args) > 4:
        return None
    origin, axis, begin, end = (*sliced.args, None, None)[:4] if len(sliced.args) >= 2 else (None,) * 4
    if not isinstance(origin, TensorVariable) or origin.name != source.name or axis not in (-1, source.rank - 1):
        return None
    width = source.shape[-1]
    begin = 0 if begin is None else begin
    end = width if end is None or (isinstance(end, int) and end >= _END_OF_AXIS) else end
    return (begin, end) if isinstance(begin, int) and isinstance(end, int) else None

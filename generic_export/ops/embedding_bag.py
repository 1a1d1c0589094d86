"""Embedding bags: rows of a table, looked up and then added up, averaged or maximised bag by bag."""

from __future__ import annotations

import math

import torch

from generic_export.ops.indexing import gather, positions
from generic_export.ops.scatter import scatter_nd
from generic_export.torch_graph.dims import Dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


@translates(aten._embedding_bag_forward_only.default, aten._embedding_bag.default)
def embedding_bag(
    b: NnefBuilder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value, ...]:
    """_embedding_bag_forward_only(Tensor weight, Tensor indices, Tensor offsets, ...) -> (Tensor, Tensor, Tensor, Tensor)"""
    del scale_grad_by_freq, sparse, include_last_offset  # gradients; the shape of the result says how many bags
    result, *bookkeeping = b.result_shapes
    bags = result[0]
    bag = _bag_of_each(b, b.cast(b.slice(offsets, 0, 0, bags), torch.int64), indices.shape[0])
    rows = gather(b, weight, indices, 0)
    if per_sample_weights is not None:
        rows = b.binary("mul", rows, b.unsqueeze(per_sample_weights, [1]))
    counted = b.full((indices.shape[0], 1), True, torch.bool)
    if padding_idx >= 0:
        padding = b.scalar(padding_idx, indices.dtype)
        counted = b.unsqueeze(b.binary("ne", indices, padding, dtype=torch.bool), [1])
    neutral = b.scalar(-math.inf if mode == _MAX else 0.0, weight.dtype)
    rows = rows if padding_idx < 0 else b.select(counted, rows, neutral)
    base = b.full(result, -math.inf if mode == _MAX else 0.0, weight.dtype)
    pooled = scatter_nd(b, base, bag, rows, "max" if mode == _MAX else "add")
    if mode == _MAX:
        # A bag without elements is zero.
        pooled = b.select(b.binary("eq", pooled, neutral, dtype=torch.bool), b.scalar(0.0, weight.dtype), pooled)
    if mode == _MEAN:
        counts = scatter_nd(b, b.full((bags, 1), 0.0, weight.dtype), bag, b.cast(counted, weight.dtype), "add")
        pooled = b.binary("div", pooled, b.binary("max", counts, b.scalar(1.0, weight.dtype)))
    # The other results only serve gradients: torch.nn.functional.embedding_bag drops them.
    return (pooled, *(b.full(shape, 0, indices.dtype) for shape in bookkeeping))


def _bag_of_each(b: NnefBuilder, starts: Value, count: Dim) -> Value:
    """Return, for each index, the last bag that begins at or before it."""
    begun = b.binary("le", b.unsqueeze(starts, [0]), positions(b, count, 0, 2), dtype=torch.bool)
    number = b.reduce("sum_reduce", b.cast(begun, torch.int64), [1], keepdim=True)
    return b.binary("sub", number, b.scalar(1, torch.int64))

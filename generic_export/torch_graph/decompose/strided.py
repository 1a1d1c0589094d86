"""`as_strided` of contiguous tensors, such as Longformer's overlapping chunks.

In: a program without writes. Out: the same one, edited in place: those reads are `as_strided_copy`, which nothing else is.
A graph has no memory layout, so `as_strided` of any other tensor is left as it is, and the translation refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_sure

aten = torch.ops.aten


def with_known_strides(program: ExportedProgram) -> None:
    """Tell reads by strides of contiguous tensors from all others."""
    for node in program.graph.nodes:
        if node.target in (aten.as_strided.default, aten.as_strided_copy.default):
            source: Any = node.args[0]
            known = _is_contiguous(source.meta["val"])
            node.target = aten.as_strided_copy.default if known else aten.as_strided.default


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Say whether the elements lie in the order of their indices, from the beginning of the memory on.

    Where that needs a relation between sizes (`view` of a multiple), it is asked for, and becomes a condition of the archive.
    """
    step: Any = 1
    known = is_sure(tensor.storage_offset() == 0)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        known = known and (is_sure(size == 1) or _are_equal(stride, step))
        step = step * size
    return known


def _are_equal(stride: Any, step: Any) -> bool:
    same = stride == step
    if not isinstance(same, torch.SymBool):
        return bool(same)
    return is_sure(same) or (bool(same.node.hint) and bool(same))


__all__ = ["with_known_strides"]

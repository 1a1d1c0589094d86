"""Tensors of other sizes than a given one, with values that stay valid: token ids, lengths, masks.

In: a tensor and sizes. Out: another tensor. Who tries a module at sizes that it was not captured with makes its arguments here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def repeated(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that repeats its values along each axis up to a size; what is empty stays empty.

    Args:
        tensor: of any element type.
        shape: a size per axis of the tensor.
    """
    times = [-(-wanted // max(size, 1)) for wanted, size in zip(shape, tensor.shape, strict=True)]
    window = tuple(slice(wanted) for wanted in shape)
    return tensor.repeat(times)[window].clone(memory_format=torch.contiguous_format)


__all__ = ["repeated"]

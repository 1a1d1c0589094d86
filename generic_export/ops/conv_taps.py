"""A convolution of each channel by itself, as a sum over the places of its kernel: for a number of channels that is not known.

tract's `conv` wants concrete channels; the batch of what torchaudio's deltas and convolutions read has become channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import sympy

from generic_export.torch_graph.dims import Dim, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value


def is_channel_by_channel(input: Value, weight: Value, groups: Dim) -> bool:
    """Say whether a convolution has dynamic channels, each with a kernel of its own whose size is known."""
    channels, per_group, *kernel = weight.shape
    if isinstance(channels, int) or not all(isinstance(size, int) for size in (per_group, *kernel)):
        return False
    return same_dim(groups, channels) and same_dim(input.shape[1], channels)


def channel_by_channel(
    b: NnefBuilder,
    padded: Value,
    weight: Value,
    bias: Value | None,
    spatial: Sequence[Dim],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    """Return the convolution.

    Args:
        b: writes it.
        padded: [N, C, ...] with its borders.
        weight: [C, 1, kernel ...].
        bias: [C] or None.
        spatial: sizes of the result after [N, C].
        stride, dilation: by spatial axis.
    """
    total: Value | None = None
    for place in product(*(range(int(size)) for size in weight.shape[2:])):  # type: ignore[arg-type]
        seen, factor = padded, weight
        for axis, at in enumerate(place):
            first, last = at * dilation[axis], sympy.sympify(spatial[axis]) - 1
            end = simplify_dim(first + stride[axis] * last + 1)
            seen = b.slice(seen, 2 + axis, first, end, stride[axis])
            factor = b.slice(factor, 2 + axis, at, at + 1)
        term = b.binary("mul", seen, b.unsqueeze(b.squeeze(factor, [1]), [0]))
        total = term if total is None else b.binary("add", total, term)
    assert total is not None  # a kernel has a place
    if bias is None:
        return total
    return b.binary("add", total, b.unsqueeze(bias, [0, *range(2, total.rank)]))


__all__ = ["channel_by_channel", "is_channel_by_channel"]

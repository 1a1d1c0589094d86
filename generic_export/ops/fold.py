"""Patches of images: unfold and fold."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.ops.conv import per_axis, surrounded, window_attributes, window_count
from generic_export.ops.indexing import written_out
from generic_export.ops.shape import volume
from generic_export.torch_graph.dims import Dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten


@translates(aten.im2col.default)
def im2col(
    b: NnefBuilder,
    self: Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor"""
    if self.rank == 3:
        return b.squeeze(im2col(b, b.unsqueeze(self, [0]), kernel_size, dilation, padding, stride), [0])
    kernel, step, around, hop = (per_axis(given, 2) for given in (kernel_size, dilation, padding, stride))
    counts = [
        window_count(self.shape[2 + axis], (around[axis], around[axis]), kernel[axis], step[axis], hop[axis])
        for axis in range(2)
    ]
    image = surrounded(b, self, [(0, 0), (0, 0), *((pad, pad) for pad in around)]) if any(around) else self
    parts = []
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            part = image
            for axis, tap in enumerate((row, column)):
                begin = tap * step[axis]
                end = simplify_dim(begin + (sympy.sympify(counts[axis]) - 1) * hop[axis] + 1)
                part = b.slice(part, 2 + axis, begin, end, hop[axis])
            parts.append(b.unsqueeze(b.reshape(part, [*part.shape[:2], *counts]), [2]))
    patches = b.concat(parts, 2)
    columns = simplify_dim(sympy.sympify(self.shape[1]) * kernel[0] * kernel[1])
    return b.reshape(patches, [self.shape[0], columns, volume(counts)])


@translates(aten.col2im.default)
def col2im(
    b: NnefBuilder,
    self: Value,
    output_size: Sequence[Dim],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, ...) -> Tensor"""
    if self.rank == 2:
        single = b.unsqueeze(self, [0])
        return b.squeeze(col2im(b, single, output_size, kernel_size, dilation, padding, stride), [0])
    kernel, step, around, hop = (per_axis(given, 2) for given in (kernel_size, dilation, padding, stride))
    taps = kernel[0] * kernel[1]
    if not isinstance(self.shape[1], int):
        raise TranslationError("fold needs a static number of channels.")
    channels = self.shape[1] // taps
    counts = [
        window_count(output_size[axis], (around[axis], around[axis]), kernel[axis], step[axis], hop[axis])
        for axis in range(2)
    ]
    # Summing patches where they overlap is a transposed convolution whose filters each have a single one. Its image ends
    # where the last patch does: what lies beyond, up to the size asked for, stays zero.
    reach = [
        simplify_dim((sympy.sympify(counts[axis]) - 1) * hop[axis] + step[axis] * (kernel[axis] - 1) + 1)
        for axis in range(2)
    ]
    patches = b.reshape(self, [self.shape[0], self.shape[1], *counts])
    image = b.emit(
        "deconv",
        [patches, _single_ones(b, channels, kernel, self.dtype)],
        shape=[self.shape[0], channels, *reach],
        dtype=self.dtype,
        attributes=window_attributes([(0, 0), (0, 0)], hop, step, channels),
    )
    return _framed(b, image, output_size, around)


def _single_ones(b: NnefBuilder, channels: int, kernel: Sequence[int], dtype: torch.dtype) -> Value:
    """Return, for each channel, one filter per tap that is one there and zero elsewhere."""
    taps = kernel[0] * kernel[1]
    filters = b.unsqueeze(b.reshape(written_out(b, torch.eye(taps), dtype), [taps, *kernel]), [0])
    return b.broadcast(filters, [channels, taps, *kernel])


def _framed(b: NnefBuilder, image: Value, output_size: Sequence[Dim], around: Sequence[int]) -> Value:
    """Cut the padding away, and add the zeros that no patch reached."""
    for axis, (size, pad) in enumerate(zip(output_size, around, strict=True), start=2):
        wanted = simplify_dim(sympy.sympify(size) + pad)
        lacking = simplify_dim(sympy.sympify(wanted) - sympy.sympify(image.shape[axis]))
        if lacking != 0 and not (isinstance(lacking, int) and lacking < 0):
            if not isinstance(lacking, int):
                # How much of the frame no patch reaches depends on the size: add the most, cut what is too much.
                lacking = simplify_dim(sympy.Max(lacking, 0))
            zeros = b.full((*image.shape[:axis], lacking, *image.shape[axis + 1 :]), 0, image.dtype)
            image = b.concat([image, zeros], axis)
        image = b.slice(image, axis, pad, wanted)
    return image

"""Pools with a fixed window: maximum (with indices), average, sum; and the inverse of the maximum.

`adaptive_pool.py` holds those whose windows follow from the size of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument
from generic_export.ops.conv import Pair, pairs, per_axis, surrounded, window_count
from generic_export.ops.reduction import widened
from generic_export.ops.scatter import scattered
from generic_export.ops.shape import volume
from generic_export.ops.variants import variant
from generic_export.torch_graph.decompose.rewrites import rewrites
from generic_export.torch_graph.dims import Dim, dim_text
from generic_export.translate.builder import NnefBuilder, Value, ints
from generic_export.translate.registry import translates

aten = torch.ops.aten


class Window:
    """A pooling window over the last axes: size, step and padding per axis, as PyTorch's arguments give them."""

    def __init__(
        self,
        kernel_size: Sequence[int] | int,
        stride: Sequence[int] | int,
        padding: Sequence[int] | int,
        dilation: Sequence[int] | int,
        count: int,
        *,
        ceil_mode: bool = False,
    ) -> None:
        self.kernel = per_axis(kernel_size, count)
        self.stride = per_axis(stride, count) if isinstance(stride, int) or len(stride) else list(self.kernel)
        self.dilation = per_axis(dilation, count)
        self.around = per_axis(padding, count)
        self.padding: list[Pair] = [(pad, pad) for pad in self.around]
        if ceil_mode:
            self.padding = [(pad, self._reach(axis)) for axis, pad in enumerate(self.around)]

    def _reach(self, axis: int) -> int:
        """How far after the image a last, incomplete window may reach: it must still start inside (PyTorch's rule)."""
        field = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return max(min(self.around[axis] + self.stride[axis], field) - 1, self.around[axis])

    def shape(self, image: Sequence[Dim]) -> list[Dim]:
        """Return how many windows there are along each axis."""
        return [
            window_count(size, self.padding[axis], self.kernel[axis], self.dilation[axis], self.stride[axis])
            for axis, size in enumerate(image)
        ]

    def attributes(self) -> dict[str, Argument]:
        """Return the arguments of tract's pools: full rank, with a border that is left out of the computation."""
        return {
            "size": ints([1, 1, *self.kernel]),
            # docs/contributing/engine-facts.md#operators-of-tract_nnef: any border but 'ignore' and 'constant' aborts.
            "border": "ignore",
            "padding": pairs([(0, 0), (0, 0), *self.padding]),
            "stride": ints([1, 1, *self.stride]),
            "dilation": ints([1, 1, *self.dilation]),
        }


def batched(b: NnefBuilder, value: Value, count: int) -> Value:
    """Return a value with a batch and a channel axis before its `count` spatial ones."""
    result = b.align_rank(value, count + 2)
    if not isinstance(result.shape[1], int):
        # deser.rs max_pool_with_index, sum_pool: "Expect constant channel depth"
        raise TranslationError(f"pooling needs a static number of channels, got {dim_text(result.shape[1])}.")
    return result


def unbatched(b: NnefBuilder, value: Value, rank: int) -> Value:
    """Undo `batched`."""
    return b.squeeze(value, range(value.rank - rank))


def max_pool(b: NnefBuilder, value: Value, window: Window) -> tuple[Value, Value]:
    """Return the maxima of the windows and their positions, counted over the flattened image as PyTorch counts them."""
    count = len(window.kernel)
    source = batched(b, value, count)
    shape = (*source.shape[:2], *window.shape(source.shape[2:]))
    facts = [(shape, source.dtype), (shape, torch.int64)]
    results = b.emit_many("max_pool_with_index", [source], facts, attributes=window.attributes())
    maxima, positions = (unbatched(b, result, value.rank) for result in results)
    return maxima, positions


def sum_pool(b: NnefBuilder, value: Value, window: Window, *, mean: bool) -> Value:
    """Return the sums of the windows, or their means over what lies inside the image; f16 is summed in f32."""
    count = len(window.kernel)
    source = widened(b, batched(b, value, count))
    shape = [*source.shape[:2], *window.shape(source.shape[2:])]
    attributes = window.attributes() | {"normalize": mean}
    pooled = b.emit("box", [source], shape=shape, dtype=source.dtype, attributes=attributes)
    return unbatched(b, b.cast(pooled, value.dtype), value.rank)


@variant(aten.max_pool1d.default, count=1, results=1)
@variant(aten.max_pool2d.default, count=2, results=1)
@variant(aten.max_pool3d.default, count=3, results=1)
@variant(aten.max_pool1d_with_indices.default, count=1, results=2)
@variant(aten.max_pool2d_with_indices.default, count=2, results=2)
@variant(aten.max_pool3d_with_indices.default, count=3, results=2)
def max_pool_with_indices(
    b: NnefBuilder,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
    *,
    count: int,
    results: int,
) -> Sequence[Value]:
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], ...) -> (Tensor, Tensor)"""
    return max_pool(b, self, Window(kernel_size, stride, padding, dilation, count, ceil_mode=ceil_mode))[:results]


@variant(aten.avg_pool1d.default, count=1, divisor_override=None)
@variant(aten.avg_pool2d.default, count=2)
@variant(aten.avg_pool3d.default, count=3)
def avg_pool(
    b: NnefBuilder,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    count: int,
) -> Value:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, ...)"""
    window = Window(kernel_size, stride, padding, 1, count, ceil_mode=ceil_mode)
    if divisor_override is not None:
        sums = sum_pool(b, self, window, mean=False)
        return b.binary("div", sums, b.scalar(float(divisor_override), sums.dtype))
    if not count_include_pad or not any(window.around):
        return sum_pool(b, self, window, mean=True)
    # PyTorch counts its own padding, but never what a last window of ceil_mode reaches beyond it: the padding is
    # written out, and the reach is left to the border.
    padded = surrounded(b, self, [(0, 0)] * (self.rank - count) + [(pad, pad) for pad in window.around])
    window.padding = [(0, after - pad) for pad, (_, after) in zip(window.around, window.padding, strict=True)]
    return sum_pool(b, padded, window, mean=True)


@variant(aten.max_unpool2d.default, stride=(), padding=())
@translates(aten.max_unpool3d.default)
def max_unpool(
    b: NnefBuilder,
    self: Value,
    indices: Value,
    output_size: Sequence[Dim],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
) -> Value:
    """max_unpool3d(Tensor self, Tensor indices, SymInt[3] output_size, int[3] stride, int[3] padding) -> Tensor

    Each value is put at its position of an image of zeros; the positions must lie in it (tract aborts otherwise).
    """
    del stride, padding  # the indices say where each value goes
    outer, image = self.shape[: -len(output_size)], self.shape[-len(output_size) :]
    flat = [*outer, volume(image)]
    zeros = b.full((*outer, volume(output_size)), 0, self.dtype)
    filled = scattered(b, zeros, len(outer), b.reshape(indices, flat), b.reshape(self, flat), None)
    return b.reshape(filled, [*outer, *output_size])


@rewrites(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Each gradient goes to the place that its maximum came from."""
    nothing = torch.zeros_like(self).flatten(-2)
    return nothing.scatter_add(-1, indices.flatten(-2), grad_output.flatten(-2)).reshape(self.shape)

"""Pools with a fixed window: maximum (with indices), average, sum; and the inverse of the maximum.

`adaptive_pool.py` holds those whose windows follow from the size of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from generic_export.compat import OpOverload, schema_of
from generic_export.errors import TranslationError
from generic_export.nnef.graph import Argument
from generic_export.ops.conv import Pair, pairs, per_axis, window_count
from generic_export.ops.shape import volume
from generic_export.torch_graph.dims import Dim, dim_text, simplify_dim
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
            # facts/tract.md §3.1: any border but 'ignore' and 'constant' aborts.
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
        raise TranslationError(f"pooling over a dynamic number of channels {dim_text(result.shape[1])}.")
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
    computing = torch.float32 if value.dtype is torch.float16 else value.dtype
    source = b.cast(batched(b, value, count), computing)
    shape = [*source.shape[:2], *window.shape(source.shape[2:])]
    attributes = window.attributes() | {"normalize": mean}
    pooled = b.emit("box", [source], shape=shape, dtype=computing, attributes=attributes)
    return unbatched(b, b.cast(pooled, value.dtype), value.rank)


def _register_max_pool(count: int, values: OpOverload, indexed: OpOverload) -> None:
    def max_pool_with_indices(
        b: NnefBuilder,
        self: Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        return max_pool(b, self, Window(kernel_size, stride, padding, dilation, count, ceil_mode=ceil_mode))

    def max_pool_values(
        b: NnefBuilder,
        self: Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
    ) -> Value:
        return max_pool_with_indices(b, self, kernel_size, stride, padding, dilation, ceil_mode)[0]

    max_pool_values.__doc__ = str(schema_of(values))
    max_pool_with_indices.__doc__ = str(schema_of(indexed))
    translates(values)(max_pool_values)
    translates(indexed)(max_pool_with_indices)


_register_max_pool(1, aten.max_pool1d.default, aten.max_pool1d_with_indices.default)
_register_max_pool(2, aten.max_pool2d.default, aten.max_pool2d_with_indices.default)
_register_max_pool(3, aten.max_pool3d.default, aten.max_pool3d_with_indices.default)


def _average(
    b: NnefBuilder,
    value: Value,
    count: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    window = Window(kernel_size, stride, padding, 1, count, ceil_mode=ceil_mode)
    if divisor_override is not None:
        sums = sum_pool(b, value, window, mean=False)
        return b.binary("div", sums, b.scalar(float(divisor_override), sums.dtype))
    if not count_include_pad or not any(window.around):
        return sum_pool(b, value, window, mean=True)
    # PyTorch counts its own padding, but never what a last window of ceil_mode reaches beyond it: the padding is
    # written out, and the reach is left to the border.
    zeros = [(0, 0)] * (value.rank - count) + [(pad, pad) for pad in window.around]
    shape = [simplify_dim(size + sum(pad)) for size, pad in zip(value.shape, zeros, strict=True)]
    padded = b.emit("pad", [value], shape=shape, dtype=value.dtype, attributes={"padding": pairs(zeros)})
    window.padding = [(0, after - pad) for pad, (_, after) in zip(window.around, window.padding, strict=True)]
    return sum_pool(b, padded, window, mean=True)


@translates(aten.avg_pool1d.default)
def avg_pool1d(
    b: NnefBuilder,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Value:
    """avg_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=[0], bool ceil_mode=False, ...)"""
    return _average(b, self, 1, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


@translates(aten.avg_pool2d.default)
def avg_pool2d(
    b: NnefBuilder,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, ...)"""
    return _average(b, self, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@translates(aten.avg_pool3d.default)
def avg_pool3d(
    b: NnefBuilder,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """avg_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, ...)"""
    return _average(b, self, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@translates(aten.max_unpool2d.default)
def max_unpool2d(b: NnefBuilder, self: Value, indices: Value, output_size: Sequence[Dim]) -> Value:
    """max_unpool2d(Tensor self, Tensor indices, SymInt[2] output_size) -> Tensor"""
    return _unpool(b, self, indices, output_size)


@translates(aten.max_unpool3d.default)
def max_unpool3d(
    b: NnefBuilder,
    self: Value,
    indices: Value,
    output_size: Sequence[Dim],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Value:
    """max_unpool3d(Tensor self, Tensor indices, SymInt[3] output_size, int[3] stride, int[3] padding) -> Tensor"""
    del stride, padding  # the indices say where each value goes
    return _unpool(b, self, indices, output_size)


def _unpool(b: NnefBuilder, value: Value, indices: Value, output_size: Sequence[Dim]) -> Value:
    """Put each value at its position of an image of zeros; the positions must lie in it (tract aborts otherwise)."""
    outer, image = value.shape[: -len(output_size)], value.shape[-len(output_size) :]
    flat = [*outer, volume(image)]
    zeros = b.full((*outer, volume(output_size)), 0, value.dtype)
    operands = [zeros, b.reshape(indices, flat), b.reshape(value, flat)]
    attributes: dict[str, Argument] = {"axis": len(outer), "reduction": "none"}
    filled = b.emit(
        "tract_core_scatter_elements", operands, shape=zeros.shape, dtype=value.dtype, attributes=attributes
    )
    return b.reshape(filled, [*outer, *output_size])


__all__ = ["Window", "batched", "max_pool", "sum_pool", "unbatched"]

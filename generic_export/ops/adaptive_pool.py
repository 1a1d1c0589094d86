"""Adaptive pools: window `i` of `out` covers floor(i*n/out) .. ceil((i+1)*n/out), whatever `n` is at run time.

Means over rectangles are means of means, maxima of rectangles are maxima of maxima: each axis is pooled on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from generic_export.errors import TranslationError
from generic_export.ops.indexing import arange, gather_elements
from generic_export.ops.pool import Window, max_pool, sum_pool
from generic_export.ops.reduction import widened
from generic_export.ops.shape import volume
from generic_export.torch_graph.dims import Dim, dim_text, floor_div, same_dim, simplify_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten


def window_bounds(size: Dim, count: Dim) -> list[tuple[Dim, Dim]]:
    """Return where each of the `count` windows of an axis begins and ends.

    Raises:
        TranslationError: the number of windows is dynamic.
    """
    if not isinstance(count, int):
        raise TranslationError(f"adaptive pooling to a dynamic size {dim_text(count)}.")
    n = sympy.sympify(size)
    return [
        (
            floor_div(simplify_dim(index * n), count),
            floor_div(simplify_dim((index + 1) * n + count - 1), count),
        )
        for index in range(count)
    ]


def _even_windows(image: Sequence[Dim], output_size: Sequence[Dim]) -> list[int] | None:
    """Return the window sizes when every axis divides into equal windows of known size."""
    if not all(isinstance(n, int) and isinstance(out, int) for n, out in zip(image, output_size, strict=True)):
        return None
    sizes = [(int(n), int(out)) for n, out in zip(image, output_size, strict=True)]  # type: ignore[arg-type]
    return [n // out for n, out in sizes] if all(out and n % out == 0 for n, out in sizes) else None


@translates(
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
)
def adaptive_avg_pool(b: NnefBuilder, self: Value, output_size: Sequence[Dim]) -> Value:
    """adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    first = self.rank - len(output_size)
    whole = [first + axis for axis, out in enumerate(output_size) if same_dim(out, 1)]
    wide = widened(b, self)
    value = b.reduce("mean_reduce", wide, whole, keepdim=True) if whole else wide
    even = _even_windows(value.shape[first:], output_size)
    if even is not None and isinstance(value.shape[first - 1], int):
        if any(size != 1 for size in even):
            value = sum_pool(b, value, Window(even, even, 0, 1, len(even)), mean=True)
        return b.cast(value, self.dtype)
    for axis, out in enumerate(output_size, start=first):
        if same_dim(value.shape[axis], out):
            continue
        if isinstance(out, int) and isinstance(value.shape[axis], int):
            parts = [b.slice(value, axis, *bounds) for bounds in window_bounds(value.shape[axis], out)]
            value = b.concat([b.reduce("mean_reduce", part, [axis], keepdim=True) for part in parts], axis)
        else:
            value = _window_means(b, value, axis, out)
    return b.cast(value, self.dtype)


def _window_means(b: NnefBuilder, value: Value, axis: int, count: Dim) -> Value:
    """Average an axis by a product with each position's share of each window.

    An infinity or NaN in one window makes NaN of the others (0 * inf). Slices would keep them apart, but tract's load takes
    minutes over sizes such as `(3*((H-1)/2)+9)/7-((2*((H-1)/2)+2)/7)`.
    """
    size = value.shape[axis]
    n = b.scalar(sympy.sympify(size), torch.int64)
    window, position = b.unsqueeze(arange(b, 0, count), [1]), b.unsqueeze(arange(b, 0, size), [0])
    windows, one = b.scalar(sympy.sympify(count), torch.int64), b.scalar(1, torch.int64)
    # floor(i*n/count) <= j is i*n < (j+1)*count, and j < ceil((i+1)*n/count) is j*count < (i+1)*n.
    begun = b.binary(
        "lt", b.binary("mul", window, n), b.binary("mul", b.binary("add", position, one), windows), dtype=torch.bool
    )
    unended = b.binary(
        "lt", b.binary("mul", position, windows), b.binary("mul", b.binary("add", window, one), n), dtype=torch.bool
    )
    inside = b.select(b.binary("and", begun, unended), b.scalar(1.0, value.dtype), b.scalar(0.0, value.dtype))
    shares = b.binary("div", inside, b.reduce("sum_reduce", inside, [1], keepdim=True))
    axes = "abcdefgh"[: value.rank]
    result = axes.replace(axes[axis], "w")
    return b.product(f"{axes},w{axes[axis]}->{result}", [value, shares])


@translates(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(b: NnefBuilder, self: Value, output_size: Sequence[int]) -> tuple[Value, Value]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    first = self.rank - len(output_size)
    even = _even_windows(self.shape[first:], output_size)
    if even is not None and isinstance(self.shape[first - 1], int):
        return max_pool(b, self, Window(even, even, 0, 1, len(even)))
    maxima, positions = self, None
    for axis in reversed(range(first, self.rank)):
        step = volume(self.shape[axis + 1 :])
        maxima, positions = _axis_maxima(b, maxima, positions, axis, output_size[axis - first], step)
    assert positions is not None
    return maxima, positions


def _axis_maxima(
    b: NnefBuilder, value: Value, positions: Value | None, axis: int, out: int, step: Dim
) -> tuple[Value, Value]:
    """Pool one axis; `positions` are those of the later axes, counted over the flattened image."""
    maxima, places = [], []
    for begin, end in window_bounds(value.shape[axis], out):
        part = b.slice(value, axis, begin, end)
        maxima.append(b.reduce("max_reduce", part, [axis], keepdim=True))
        found = b.reduce("argmax_reduce", part, [axis], keepdim=True, dtype=torch.int64)
        place = b.binary("mul", b.binary("add", found, b.scalar(begin, torch.int64)), b.scalar(step, torch.int64))
        if positions is not None:
            within = gather_elements(b, b.slice(positions, axis, begin, end), found, axis)
            place = b.binary("add", place, within)
        places.append(place)
    return b.concat(maxima, axis), b.concat(places, axis)

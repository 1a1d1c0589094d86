"""Sampling of images at the points of a grid (spatial transformers, deformable attention)."""

from __future__ import annotations

import sympy
import torch

from generic_export.nnef.graph import Argument
from generic_export.ops.conv import surrounded
from generic_export.torch_graph.dims import simplify_dim
from generic_export.translate.builder import NnefBuilder, Value
from generic_export.translate.registry import translates

aten = torch.ops.aten

# The numbers by which PyTorch's operator knows the modes of torch.nn.functional.grid_sample.
_MODES = ("bilinear", "nearest", "bicubic")
_PADDING_MODES = ("zeros", "border", "reflection")

_REACH = 2  # how far beyond the image a cubic tap still differs from the edge
_FRAME = 5  # room for those taps: positions are kept within _REACH + 1 of the edge


@translates(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    b: NnefBuilder, input: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    """grid_sampler(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""
    mode, padding = _MODES[interpolation_mode], _PADDING_MODES[padding_mode]
    image = b.cast(input, torch.float32)  # grid_sample.rs computes in f32
    points = b.cast(grid, torch.float32)
    if mode == "bicubic" and padding == "border":
        image, points = _framed(b, image, points, align_corners)
        padding = "zeros"
    attributes: dict[str, Argument] = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    shape = [*input.shape[:2], *grid.shape[1:-1]]
    sampled = b.emit("tract_core_grid_sample", [image, points], shape=shape, dtype=torch.float32, attributes=attributes)
    return b.cast(sampled, input.dtype)


def _framed(b: NnefBuilder, image: Value, points: Value, align_corners: bool) -> tuple[Value, Value]:
    """Write the border out around the image, and move the points accordingly.

    tract clamps a point to the image before it takes the cubic taps, PyTorch clamps each tap: they differ outside.
    """
    framed = surrounded(b, image, [(0, 0), (0, 0), (_FRAME, _FRAME), (_FRAME, _FRAME)], border="replicated")
    columns = []
    for coordinate, size in enumerate((image.shape[3], image.shape[2])):
        part = b.slice(points, 3, coordinate, coordinate + 1)
        columns.append(_moved(b, part, sympy.sympify(size), align_corners))
    return framed, b.concat(columns, 3)


def _moved(b: NnefBuilder, point: Value, size: sympy.Expr, align_corners: bool) -> Value:
    """Express a normalised coordinate of an axis of `size` in the frame: pixel, clamp, shift, normalise."""
    f32 = torch.float32
    shifted = b.binary("add", point, b.scalar(1.0, f32))
    span = size - 1 if align_corners else size
    pixel = b.binary("mul", shifted, b.binary("mul", b.scalar(simplify_dim(span), f32), b.scalar(0.5, f32)))
    if not align_corners:
        pixel = b.binary("sub", pixel, b.scalar(0.5, f32))
    pixel = b.binary("max", pixel, b.scalar(-float(_REACH + 1), f32))
    pixel = b.binary("min", pixel, b.scalar(simplify_dim(size + _REACH), f32))
    inside = b.binary("add", pixel, b.scalar(float(_FRAME) + (0.0 if align_corners else 0.5), f32))
    doubled = b.binary("mul", inside, b.scalar(2.0, f32))
    ratio = b.binary("div", doubled, b.scalar(simplify_dim(span + 2 * _FRAME), f32))
    return b.binary("sub", ratio, b.scalar(1.0, f32))

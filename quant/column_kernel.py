"""What error compensation does to a few columns of a weight at a time, compiled: rounding them in turn, and refitting a group.

In: columns of a weight as rows of float32 arrays, so that the weight's rows lie side by side in the vector lanes; all is changed
in place. Sums run over columns in order: the same bits on every processor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.block_kernel import half
from quant.blocks import GROUP, ZERO_POINT
from quant.compiled import compiled, part
from quant.lanes import Floats

_SPAN = 512  # rows of the weight at a time: 32 columns of them fit into a core's second cache

_LOWEST, _HIGHEST = np.float32(-ZERO_POINT), np.float32(15 - ZERO_POINT)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_LARGEST_HALF = np.float32(65504.0)


@part
def _add_multiple(target: Floats, source: Floats, factor: np.float32) -> None:
    for row in range(len(target)):
        target[row] += source[row] * factor


@part
def _round(wanted: Floats, error: Floats, level: Floats, scale: Floats, inverse: Floats) -> None:
    for row in range(len(wanted)):
        level[row] = min(max(np.rint(wanted[row] * inverse[row]), _LOWEST), _HIGHEST)
        error[row] -= level[row] * scale[row]


@compiled
def round_backwards(
    wanted: Floats,
    errors: Floats,
    levels: Floats,
    scales: Floats,
    inverses: Floats,
    group_of: NDArray[np.int64],
    factor: Floats,
) -> None:
    """Round columns from the last to the first, each making up for those behind it.

    Args:
        wanted: float32 [n, N], the n columns with what all columns behind these pass on; used up.
        errors: float32 [n, N], the columns themselves; then what rounding took from them.
        levels: float32 [n, N], filled in: -8 to 7.
        scales: float32 [G, N] of all groups.
        inverses: 1 / scale, or 0.
        group_of: which of the groups each column belongs to, [n].
        factor: float32 [n, n]; what the error of column k adds to column j is factor[k, j].
    """
    count, rows = wanted.shape
    for first in range(0, rows, _SPAN):
        last = min(first + _SPAN, rows)
        for k in range(count - 1, -1, -1):
            scale, inverse = scales[group_of[k], first:last], inverses[group_of[k], first:last]
            _round(wanted[k, first:last], errors[k, first:last], levels[k, first:last], scale, inverse)
            for j in range(k):
                _add_multiple(wanted[j, first:last], errors[k, first:last], factor[k, j])


@part
def _choose(level: Floats, scale: Floats, slope: Floats, curvature: np.float32, step: Floats) -> None:
    """Take the best level of one value of each row; fill in by how much that changes the value."""
    for row in range(len(level)):
        unit = scale[row] * curvature
        wanted = level[row] + (slope[row] / unit if unit != _ZERO else _ZERO)
        best = min(max(np.rint(wanted), _LOWEST), _HIGHEST)
        step[row] = (best - level[row]) * scale[row]
        level[row] = best


@part
def _multiply(first: Floats, second: Floats, product: Floats) -> None:
    for row in range(len(product)):
        product[row] = first[row] * second[row]


@part
def _add_product(first: Floats, second: Floats, total: Floats) -> None:
    for row in range(len(total)):
        total[row] += first[row] * second[row]


@part
def _refit(scale: Floats, overlap: Floats, power: Floats) -> None:
    for row in range(len(scale)):
        refitted = scale[row] + (overlap[row] / power[row] if power[row] > _ZERO else _ZERO)
        scale[row] = half(refitted) if abs(refitted) <= _LARGEST_HALF else scale[row]


@part
def _difference(level: Floats, scale: Floats, before: Floats, change: Floats) -> None:
    for row in range(len(level)):
        change[row] = level[row] * scale[row] - before[row]


@compiled
def descend_group(levels: Floats, scales: Floats, slopes: Floats, hessian: Floats) -> None:
    """Give each value of a group in turn its best level, then the group its best scale.

    Args:
        levels: float32 [32, N].
        scales: float32 [N], as float16 holds them.
        slopes: float32 [32, N], (W - Q) H at these columns; then how their values changed.
        hessian: float32 [32, 32], of these columns.
    """
    room, sums = np.empty((GROUP, _SPAN), np.float32), np.empty((3, _SPAN), np.float32)
    for first in range(0, len(scales), _SPAN):
        last = min(first + _SPAN, len(scales))
        span = last - first
        scale, before = scales[first:last], room[:, :span]
        step, overlap, power = sums[0, :span], sums[1, :span], sums[2, :span]
        overlap[:] = power[:] = _ZERO
        for k in range(GROUP):
            level = levels[k, first:last]
            _multiply(level, scale, before[k])
            _choose(level, scale, slopes[k, first:last], hessian[k, k], step)
            for j in range(GROUP):
                _add_multiple(slopes[j, first:last], step, -hessian[k, j])
        for k in range(GROUP):
            level = levels[k, first:last]
            _add_product(slopes[k, first:last], level, overlap)
            step[:] = hessian[k, k] * level  # becomes what row k of q^T H q adds, with what its mirror image does
            for j in range(k):
                _add_multiple(step, levels[j, first:last], _TWO * hessian[k, j])
            _add_product(level, step, power)
        _refit(scale, overlap, power)
        for k in range(GROUP):
            _difference(levels[k, first:last], scale, before[k], slopes[k, first:last])

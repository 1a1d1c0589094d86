"""The inner loops of the scale search, compiled: one pass over memory, everything else in registers and the first cache.

In: rows of float32 weights, what each value matters. Out: stored scales and levels of each group of 32, filled in.
Sums run over the values of a group in order, with groups side by side in the vector lanes: the same bits on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from quant.blocks import GROUP, ZERO_POINT

OK, BAD_WEIGHT, BAD_IMPORTANCE = 0, 1, 2

# Where the value of largest magnitude lands, in steps of the scale, before the scale is refitted. Negative positions use
# the free extra level at -8; beyond -8 and 7 that value is clipped, which pays when it matters little.
_POSITIONS = np.array(
    (-8.9, -8.6, -8.3, -8.0, -7.7, -7.4, -7.1, -6.8, -6.4, 6.4, 6.8, 7.1, 7.4, 7.7, 8.0, 8.3), np.float32
)
_REFITS = 2

_LANES = (
    64  # groups side by side: four times the widest vector, so that additions of one chain do not wait for each other
)
_LOWEST, _HIGHEST = np.float32(-ZERO_POINT), np.float32(15 - ZERO_POINT)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST = np.float32(np.finfo(np.float32).max)
_TINY = np.float32(np.finfo(np.float32).tiny)
_TINIEST_MAXIMUM = np.float32(1e-8)  # below, every scale rounds to zero in float16
_SMALLEST_IMPORTANCE = np.float32(1e-12)  # relative to the largest of the group: no channel is ever free

# float16: 11 significant bits down to 2^-14, multiples of 2^-24 below (IEEE 754 binary16).
_LARGEST_HALF = np.float32(65504.0)
_SMALLEST_NORMAL_HALF = np.float32(2.0**-14)
_HALF_STEPS = np.float32(2.0**24)
_HALF_STEP = np.float32(2.0**-24)
_SPLIT = np.float32(2.0**13 + 1)  # Veltkamp's constant that leaves 11 of 24 bits

Compiled = Callable[..., Any]


def _compiled(function: Compiled) -> Compiled:
    """Compile at the first call, without Python's lock, and keep the result between processes where a cache can be written."""
    try:
        compiled: Compiled = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the home can be written
        compiled = njit(nogil=True, error_model="numpy")(function)
    return compiled


@_compiled
def _half(value: np.float32) -> np.float32:
    """Return a float32 that float16 holds exactly, next to `value`."""
    value = min(max(value, -_LARGEST_HALF), _LARGEST_HALF)
    if abs(value) < _SMALLEST_NORMAL_HALF:
        return np.rint(value * _HALF_STEPS) * _HALF_STEP
    split = value * _SPLIT
    return split - (split - value)


@_compiled
def _load(
    weights: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
    first: int,
    unit: NDArray[np.float32],
    share: NDArray[np.float32],
) -> int:
    """Copy groups `first` and following of [rows, K] into the lanes [32, _LANES]; lanes beyond the end stay as they are."""
    groups_in_row = weights.shape[1] // GROUP
    status = OK
    for lane in range(min(_LANES, weights.shape[0] * groups_in_row - first)):
        row, column = (first + lane) // groups_in_row, (first + lane) % groups_in_row * GROUP
        for index in range(GROUP):
            value = weights[row, column + index]
            matters = abs(value) if importance is None else importance[row, column + index]
            if not abs(value) <= _LARGEST:
                status = BAD_WEIGHT
            if not _ZERO <= matters <= _LARGEST and status == OK:
                status = BAD_IMPORTANCE
            unit[index, lane] = value
            share[index, lane] = matters
    return status


@_compiled
def _normalise(unit: NDArray[np.float32], share: NDArray[np.float32], largest: NDArray[np.float32]) -> None:
    """Divide each group by its signed maximum, and its importance by the largest of it.

    Every group then has its extreme at +1: candidates are the same numbers for all, squares neither overflow nor vanish.
    """
    high, low, peak = unit[0].copy(), unit[0].copy(), share[0].copy()
    for index in range(1, GROUP):
        for lane in range(_LANES):
            high[lane] = max(high[lane], unit[index, lane])
            low[lane] = min(low[lane], unit[index, lane])
            peak[lane] = max(peak[lane], share[index, lane])
    for lane in range(_LANES):
        extreme = high[lane] if high[lane] > -low[lane] else low[lane]
        largest[lane] = extreme if abs(extreme) >= _TINIEST_MAXIMUM else _ZERO
        low[lane] = extreme if abs(extreme) >= _TINIEST_MAXIMUM else _ONE
    for index in range(GROUP):
        for lane in range(_LANES):
            unit[index, lane] = unit[index, lane] / low[lane]
            relative = share[index, lane] / peak[lane] if peak[lane] > _ZERO else _ONE
            share[index, lane] = max(relative, _SMALLEST_IMPORTANCE)


@_compiled
def _best_position(unit: NDArray[np.float32], share: NDArray[np.float32], best: NDArray[np.float32]) -> None:
    """Fill in the refitted scale, relative to the signed maximum, of the position with the smallest error.

    For fixed levels the error is sum(s w^2) - (sum(s w q))^2 / sum(s q^2), so the largest subtrahend wins.
    """
    gain, overlap, power = np.zeros(_LANES, np.float32), np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    best[:] = _ONE / _LOWEST
    for position in _POSITIONS:
        overlap[:], power[:] = _ZERO, _TINY
        for index in range(GROUP):
            for lane in range(_LANES):
                level = min(max(np.rint(unit[index, lane] * position), _LOWEST), _HIGHEST)
                weighted = share[index, lane] * level
                overlap[lane] += weighted * unit[index, lane]
                power[lane] += weighted * level
        for lane in range(_LANES):
            scale = overlap[lane] / power[lane]
            better = overlap[lane] * scale > gain[lane]
            gain[lane] = overlap[lane] * scale if better else gain[lane]
            best[lane] = scale if better else best[lane]


@_compiled
def _improve(
    unit: NDArray[np.float32],
    share: NDArray[np.float32],
    largest: NDArray[np.float32],
    candidate: NDArray[np.float32],
    scale: NDArray[np.float32],
    error: NDArray[np.float32],
) -> None:
    """Take the candidates (stored scales) that lower the error; those become the winners' refits to their own levels."""
    ratio, step = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    found, overlap, power = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
    for lane in range(_LANES):
        ratio[lane] = largest[lane] / candidate[lane] if candidate[lane] != _ZERO else _ZERO
        step[lane] = candidate[lane] / largest[lane] if largest[lane] != _ZERO else _ZERO
    for index in range(GROUP):
        for lane in range(_LANES):
            value, matters = unit[index, lane], share[index, lane]
            level = min(max(np.rint(value * ratio[lane]), _LOWEST), _HIGHEST)
            difference = value - level * step[lane]
            weighted = matters * level
            found[lane] += matters * difference * difference
            overlap[lane] += weighted * value
            power[lane] += weighted * level
    for lane in range(_LANES):
        if found[lane] < error[lane]:
            error[lane], scale[lane] = found[lane], candidate[lane]
            refitted = overlap[lane] / power[lane] if power[lane] > _ZERO else _ONE / _LOWEST
            candidate[lane] = _half(refitted * largest[lane])


@_compiled
def _store(
    weights: NDArray[np.float32],
    first: int,
    scale: NDArray[np.float32],
    levels: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> None:
    """Write each group's scale, and the levels nearest to its weights."""
    groups_in_row = weights.shape[1] // GROUP
    for lane in range(min(_LANES, len(scales) - first)):
        group = first + lane
        row, column = group // groups_in_row, group % groups_in_row * GROUP
        d = scale[lane]
        scales[group] = d
        inverse = _ONE / d if d != _ZERO else _ZERO
        for index in range(GROUP):
            level = min(max(np.rint(weights[row, column + index] * inverse), _LOWEST), _HIGHEST)
            levels[group, index] = np.uint8(level - _LOWEST)


@_compiled
def search_scales(
    weights: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
    levels: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> int:
    """Choose scale and levels of every group of 32 in each row; see `quant.weighted_search`.

    Args:
        weights: float32 [rows, K], K a multiple of 32.
        importance: float32 [rows, K], any strides; None for the magnitude of the weights.
        levels: uint8 [rows * K // 32, 32], filled in.
        scales: float32 [rows * K // 32], filled in with values that float16 holds exactly.

    Returns:
        `OK`, `BAD_WEIGHT` (inf or nan) or `BAD_IMPORTANCE` (inf, nan or negative).
    """
    unit, share = np.zeros((GROUP, _LANES), np.float32), np.zeros((GROUP, _LANES), np.float32)
    largest, candidate = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    scale, error = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for first in range(0, len(scales), _LANES):
        status = _load(weights, importance, first, unit, share)
        if status != OK:
            return int(status)
        _normalise(unit, share, largest)
        scale[:], error[:] = _ZERO, np.inf
        for lane in range(_LANES):
            candidate[lane] = _half(largest[lane] / _LOWEST)
        _improve(unit, share, largest, candidate, scale, error)
        _best_position(unit, share, candidate)
        for lane in range(_LANES):
            candidate[lane] = _half(candidate[lane] * largest[lane])
        for _ in range(1 + _REFITS):
            _improve(unit, share, largest, candidate, scale, error)
        _store(weights, first, scale, levels, scales)
    return OK

"""Weights to Q4_0 blocks in one compiled pass: read, scale search, rounding, packing and the error, without a copy between.

In: groups of 32 weights as a checkpoint stores them (bf16, f16, f32), what each value matters. Out: packed blocks, and their error.
Sums run over the values of a group in order, with groups side by side in the vector lanes: the same bits on every processor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.blocks import GROUP, ZERO_POINT
from quant.compiled import compiled, inlined, part
from quant.lanes import BLOCK_WORDS, LANES, LEVEL_WORDS, Floats, Lanes, Words

OK, BAD_WEIGHT, BAD_IMPORTANCE = 0, 1, 2
BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2

# Where the value of largest magnitude lands, in steps of the scale, before the scale is refitted. Negative positions use
# the free extra level at -8; beyond -8 and 7 that value is clipped, which pays when it matters little. Up to 7.4 no level
# is clipped, so that a position and its negative give the same error: the positive ones are left out there.
_POSITIONS = np.array((-8.9, -8.6, -8.3, -8.0, -7.7, -7.4, -7.1, -6.8, -6.4, 7.7, 8.0, 8.3), np.float32)
_NEVER_ABOVE = np.float32(7.5)  # in magnitude: nothing to clip
_NEVER_BELOW = np.float32(8.5)  # nothing to clip at -8
_REFITS = 2

# Values of a group in one round of the inner loops: unrolled, so that sums stay in registers for that long.
_ROUND = 8

_LOWEST, _HIGHEST = np.float32(-ZERO_POINT), np.float32(15 - ZERO_POINT)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_TINY = np.float32(np.finfo(np.float32).tiny)
_TINIEST_MAXIMUM = np.float32(1e-8)  # below, every scale rounds to zero in float16
_SMALLEST_IMPORTANCE = np.float32(1e-12)  # relative to the largest of the group: no channel is ever free
_MAGNITUDE_BITS, _INFINITY_BITS = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
_ZERO_BITS, _MINUS_ZERO_BITS = np.uint32(0), np.uint32(0x8000_0000)

# float16: 11 significant bits down to 2^-14, multiples of 2^-24 below (IEEE 754 binary16).
_LARGEST_HALF = np.float32(65504.0)
_SMALLEST_NORMAL_HALF = np.float32(2.0**-14)
_HALF_STEPS = np.float32(2.0**24)
_HALF_STEP = np.float32(2.0**-24)
_SPLIT = np.float32(2.0**13 + 1)  # Veltkamp's constant that leaves 11 of 24 bits
_HALF_BIAS = np.uint32((127 - 15) << 23)  # between the exponents of float16 and float32, where float32 has its exponent

# bf16 moves a value by up to 2^-8 of it; the float16 scale and its fit add a little. A group within this distance of a grid
# loses nothing that the checkpoint still knew, and 32 values do not come so close by chance.
_BFLOAT16_ROUNDING = np.float32(2.0**-8)
_NOISE = np.float32(1.25 * 2.0**-8)
_PROBE_STEP = 8  # four values of a group refuse almost every grid that does not fit
_PROBE_NOISE = np.float32(2 * 1.25 * 2.0**-8)  # the scale comes from one value and carries its own
_FIRST_LOOK_NOISE = np.float32(2.1 * 1.25 * 2.0**-8)  # a little more: what it lets through is looked at again

_MANY = 8  # one in so many groups on a grid is no chance

# --- float16 ----------------------------------------------------------------------------------------


@part
def half(value: np.float32) -> np.float32:
    """Return a float32 that float16 holds exactly, next to `value`."""
    value = min(max(value, -_LARGEST_HALF), _LARGEST_HALF)
    split = value * _SPLIT
    return np.rint(value * _HALF_STEPS) * _HALF_STEP if abs(value) < _SMALLEST_NORMAL_HALF else split - (split - value)


@part
def _half_bits(value: np.float32, bits: np.uint32) -> np.uint16:
    """Return the float16 of a float32, with its own bits, that float16 holds exactly."""
    magnitude = bits & _MAGNITUDE_BITS
    normal = (magnitude - _HALF_BIAS) >> np.uint32(13)
    small = np.uint32(abs(value) * _HALF_STEPS)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    return np.uint16(sign | (small if abs(value) < _SMALLEST_NORMAL_HALF else normal))


# --- reading ----------------------------------------------------------------------------------------


@part
def _deal(source: Words, target: Words) -> None:
    """Deal values in turn onto the two halves of the target."""
    middle = GROUP * LANES // 2
    for place in range(middle):
        target[place] = source[2 * place]
        target[place + middle] = source[2 * place + 1]


@part
def _turn(groups: Words, first: int, spare: Words, lanes: Words) -> None:
    """Put groups `first` and following into lanes: dealt five times, the 32 values of a group end that far apart."""
    begin, end = first * GROUP, (first + LANES) * GROUP
    if end <= len(groups):
        _deal(groups[begin:end], lanes)
    else:
        for place in range(GROUP * LANES):
            spare[place] = groups[begin + place] if begin + place < len(groups) else 0
        _deal(spare, lanes)
    _deal(lanes, spare)
    _deal(spare, lanes)
    _deal(lanes, spare)
    _deal(spare, lanes)


@part
def _widen_bfloat16(short: NDArray[np.uint16], bits: NDArray[np.uint32]) -> None:
    for place in range(GROUP * LANES):
        bits[place] = np.uint32(short[place]) << np.uint32(16)


@part
def _widen_float16(short: NDArray[np.uint16], bits: NDArray[np.uint32], values: Floats) -> None:
    """Fill in float32 `values`; `bits` is the same memory."""
    for place in range(GROUP * LANES):
        magnitude = np.uint32(short[place]) & np.uint32(0x7FFF)
        wide = (magnitude << np.uint32(13)) + _HALF_BIAS
        bits[place] = _INFINITY_BITS if magnitude >= np.uint32(0x7C00) else wide  # nan as well: both are refused
    for place in range(GROUP * LANES):
        magnitude = np.uint32(short[place]) & np.uint32(0x7FFF)
        positive = np.float32(magnitude) * _HALF_STEP if magnitude < np.uint32(0x0400) else values[place]
        values[place] = -positive if short[place] >= np.uint16(0x8000) else positive


@part
def _load(short: NDArray[np.uint16], long: NDArray[np.uint32], kind: int, first: int, lanes: Lanes) -> bool:
    """Fill in the values of groups `first` and following; say whether all of them are finite."""
    bits = lanes.bits
    if kind == FLOAT32:
        _turn(long, first, lanes.unit_bits, bits)
    else:
        _turn(short, first, lanes.spare, lanes.turned)
        if kind == FLOAT16:
            _widen_float16(lanes.turned, bits, lanes.values)
        else:
            _widen_bfloat16(lanes.turned, bits)
    largest = np.uint32(0)
    for place in range(GROUP * LANES):
        largest = max(largest, bits[place] & _MAGNITUDE_BITS)
    return bool(largest < _INFINITY_BITS)


@part
def _load_importance(importance: Floats, columns: int, row_step: int, first: int, lanes: Lanes) -> bool:
    """Fill in the importance of groups `first` and following, divided by the largest of its group.

    A group where nothing matters counts every value. Returns whether all of it is finite and not negative.
    """
    staged, share, bits, peak = lanes.values, lanes.share, lanes.share_bits, lanes.power
    for lane in range(LANES):
        place = (first + lane) * GROUP
        start = min(
            place // columns * row_step + place % columns, len(importance) - GROUP
        )  # beyond the last: any other
        for index in range(GROUP):
            staged[lane * GROUP + index] = importance[start + index]
    _turn(lanes.bits, 0, lanes.unit_bits, bits)
    worst = np.uint32(0)  # as words, negative values are above infinity
    for place in range(GROUP * LANES):
        worst = max(worst, _ZERO_BITS if bits[place] == _MINUS_ZERO_BITS else bits[place])
    for lane in range(LANES):
        peak[lane] = _ZERO
    for index in range(GROUP):
        for lane in range(LANES):
            peak[lane] = max(peak[lane], share[index * LANES + lane])
    for index in range(GROUP):
        for lane in range(LANES):
            relative = share[index * LANES + lane] / peak[lane] if peak[lane] > _ZERO else _ONE
            share[index * LANES + lane] = max(relative, _SMALLEST_IMPORTANCE)
    return bool(worst < _INFINITY_BITS)


@part
def _normalise(values: Floats, unit: Floats, largest: Floats, divisor: Floats) -> None:
    """Divide each group by its signed maximum.

    Every group then has its extreme at +1: candidates are the same numbers for all, squares neither overflow nor vanish.
    """
    for lane in range(LANES):
        largest[lane] = divisor[lane] = values[lane]
    for start in range(0, GROUP * LANES, _ROUND * LANES):
        for lane in range(LANES):
            high, low = largest[lane], divisor[lane]
            for index in range(_ROUND):
                value = values[start + index * LANES + lane]
                high, low = max(high, value), min(low, value)
            largest[lane], divisor[lane] = high, low
    for lane in range(LANES):
        extreme = largest[lane] if largest[lane] > -divisor[lane] else divisor[lane]
        usable = abs(extreme) >= _TINIEST_MAXIMUM
        largest[lane] = extreme if usable else _ZERO
        divisor[lane] = extreme if usable else _ONE
    for index in range(GROUP):
        for lane in range(LANES):
            unit[index * LANES + lane] = values[index * LANES + lane] / divisor[lane]


@part
def _take_magnitudes(unit: Floats, share: Floats) -> None:
    """Let each value matter as much as it is large; the largest of a group is 1."""
    for place in range(GROUP * LANES):
        share[place] = max(abs(unit[place]), _SMALLEST_IMPORTANCE)


# --- the search -------------------------------------------------------------------------------------


@inlined
def _add_up(lanes: Lanes, position: np.float32, clip_above: bool, clip_below: bool) -> None:
    """Add up s w q and s q^2 of each group, for the levels q that a position gives, clipped where they have to be."""
    unit, share, overlap, power = lanes.unit, lanes.share, lanes.overlap, lanes.power
    for lane in range(LANES):
        overlap[lane], power[lane] = _ZERO, _TINY
    for start in range(0, GROUP * LANES, _ROUND * LANES):
        for lane in range(LANES):
            products, squares = overlap[lane], power[lane]
            for index in range(_ROUND):
                value = unit[start + index * LANES + lane]
                level = np.rint(value * position)
                level = min(level, _HIGHEST) if clip_above else level
                level = max(level, _LOWEST) if clip_below else level
                weighted = share[start + index * LANES + lane] * level
                products += weighted * value
                squares += weighted * level
            overlap[lane], power[lane] = products, squares


@inlined
def _take_better(lanes: Lanes) -> None:
    """Make the refitted scale, relative to the signed maximum, the candidate where the error is smaller.

    For fixed levels the error is sum(s w^2) - (sum(s w q))^2 / sum(s q^2), so the larger subtrahend wins.
    """
    overlap, power, gain, candidate = lanes.overlap, lanes.power, lanes.gain, lanes.candidate
    for lane in range(LANES):
        scale = overlap[lane] / power[lane]
        better = overlap[lane] * scale > gain[lane]
        gain[lane] = overlap[lane] * scale if better else gain[lane]
        candidate[lane] = scale if better else candidate[lane]


@part
def _try_positions(lanes: Lanes) -> None:
    """Make the best of all positions the candidate."""
    for lane in range(LANES):
        lanes.gain[lane], lanes.candidate[lane] = _ZERO, _ONE / _LOWEST
    for position in _POSITIONS:
        if abs(position) < _NEVER_ABOVE:
            _add_up(lanes, position, False, False)
        elif abs(position) < _NEVER_BELOW:
            _add_up(lanes, position, True, False)
        else:
            _add_up(lanes, position, True, True)
        _take_better(lanes)
    for lane in range(LANES):
        lanes.candidate[lane] = half(lanes.candidate[lane] * lanes.largest[lane])


@inlined
def _improve(lanes: Lanes, refit: bool) -> None:
    """Take the candidates that lower the error; with `refit`, those then become the winners' refits to their own levels."""
    unit, share, largest, candidate = lanes.unit, lanes.share, lanes.largest, lanes.candidate
    ratio, step, found, overlap, power = lanes.ratio, lanes.step, lanes.found, lanes.overlap, lanes.power
    for lane in range(LANES):
        ratio[lane] = largest[lane] / candidate[lane] if candidate[lane] != _ZERO else _ZERO
        step[lane] = candidate[lane] / largest[lane] if largest[lane] != _ZERO else _ZERO
        found[lane] = overlap[lane] = power[lane] = _ZERO
    for start in range(0, GROUP * LANES, _ROUND * LANES):
        for lane in range(LANES):
            errors, products, squares = found[lane], overlap[lane], power[lane]
            for index in range(_ROUND):
                value, matters = unit[start + index * LANES + lane], share[start + index * LANES + lane]
                level = min(max(np.rint(value * ratio[lane]), _LOWEST), _HIGHEST)
                difference = value - level * step[lane]
                errors += matters * difference * difference
                if refit:
                    products += matters * level * value
                    squares += matters * level * level
            found[lane], overlap[lane], power[lane] = errors, products, squares
    scale, error = lanes.scale, lanes.error
    for lane in range(LANES):
        better = found[lane] < error[lane]
        error[lane] = found[lane] if better else error[lane]
        scale[lane] = candidate[lane] if better else scale[lane]
        refitted = overlap[lane] / power[lane] if power[lane] > _ZERO else _ONE / _LOWEST
        candidate[lane] = half(refitted * largest[lane]) if refit and better else candidate[lane]


@part
def _compare(lanes: Lanes) -> None:
    _improve(lanes, False)


@part
def _compare_and_refit(lanes: Lanes) -> None:
    _improve(lanes, True)


@part
def _search(lanes: Lanes) -> None:
    """Fill in the scales: the signed maximum over -8, or the best position, refitted; whatever has the smallest error."""
    for lane in range(LANES):
        lanes.scale[lane], lanes.error[lane] = _ZERO, np.float32(np.inf)
        lanes.candidate[lane] = half(lanes.largest[lane] / _LOWEST)
    _compare(lanes)
    _try_positions(lanes)
    for _ in range(_REFITS):
        _compare_and_refit(lanes)
    _compare(lanes)


# --- grids ------------------------------------------------------------------------------------------


@part
def _look_for_grids(unit: Floats, flags: Floats) -> None:
    """Fill in 1 for the groups whose probes could lie on a grid, else 0: whichever level their maximum may have."""
    for lane in range(LANES):
        flags[lane] = _ZERO
    for magnitude in range(
        5, ZERO_POINT + 1
    ):  # a grid whose largest level is below that fits one of these with finer steps
        for lane in range(LANES):
            excess = _ZERO
            for index in range(0, GROUP, _PROBE_STEP):
                steps = unit[index * LANES + lane] * np.float32(magnitude)
                excess = max(excess, abs(steps - np.rint(steps)) - abs(steps) * _FIRST_LOOK_NOISE)
            flags[lane] = _ONE if excess <= _ZERO else flags[lane]


@part
def _level(value: np.float32, scale: np.float32) -> np.float32:
    return min(max(np.rint(value / scale), _LOWEST), _HIGHEST)


@part
def _misfit(values: Floats, lane: int, largest: np.float32, guess: np.float32, scale: np.float32) -> np.float32:
    """Return the squared misfit of a scale for the levels that `guess` gives; inf where a value is off that grid."""
    total = _ZERO
    for index in range(GROUP):
        value = values[index * LANES + lane]
        difference = abs(_level(value, guess) * scale - value)
        if not difference <= abs(value) * _NOISE:
            return np.float32(np.inf)
        total += (difference / largest) ** 2
    return total if scale != _ZERO else np.float32(np.inf)


@part
def _fit_grid(values: Floats, lane: int, largest: np.float32, guess: np.float32) -> tuple[np.float32, np.float32]:
    """Return the scale, as float16 holds it, refitted to the levels that `guess` gives, and its squared misfit."""
    for index in range(0, GROUP, _PROBE_STEP):
        steps = values[index * LANES + lane] / guess
        if not abs(steps - min(max(np.rint(steps), _LOWEST), _HIGHEST)) <= abs(steps) * _PROBE_NOISE:
            return _ZERO, np.float32(np.inf)
    total, count, is_bfloat16 = 0.0, 0, True
    low, high = np.float32(-np.inf), np.float32(np.inf)
    for index in range(GROUP):
        value = values[index * LANES + lane]
        level = _level(value, guess)
        split = value * np.float32(65537.0)
        is_bfloat16 = is_bfloat16 and split - (split - value) == value
        if level != _ZERO:
            ratio = value / level
            total, count = total + ratio, count + 1
            low = max(low, ratio - abs(ratio) * _BFLOAT16_ROUNDING)
            high = min(high, ratio + abs(ratio) * _BFLOAT16_ROUNDING)
    # Noise is relative: every value but zero tells as much of the scale.
    scale = half(np.float32(total / count))
    misfit = _misfit(values, lane, largest, guess, scale)
    # The scales that explain every rounding to bf16 form a narrow interval, which tells more than the mean does.
    if is_bfloat16 and misfit > _ZERO:
        narrowed = half((low + high) / np.float32(2.0))
        narrowed_misfit = _misfit(values, lane, largest, guess, narrowed)
        if narrowed_misfit < np.float32(np.inf):
            return narrowed, narrowed_misfit
    return scale, misfit


@part
def _grid_scale(values: Floats, lane: int, largest: np.float32) -> np.float32:
    """Return the scale of which all values of a group are multiples, -8 to 7, but for storage noise; 0 where there is none."""
    best, best_misfit = _ZERO, np.float32(np.inf)
    for level in range(-ZERO_POINT, 16 - ZERO_POINT):
        if level:
            scale, misfit = _fit_grid(values, lane, largest, largest / np.float32(level))
            if misfit < best_misfit:
                best, best_misfit = scale, misfit
    return best


@part
def _propose_grids(lanes: Lanes) -> tuple[int, int]:
    """Make the scales of groups that lie on a grid candidates, and those of the others what they are.

    Returns:
        How many groups lie on a grid, and how many there are; groups of zeros lie on every grid and count nowhere.
    """
    flags, found, counted = lanes.found, 0, 0
    _look_for_grids(lanes.unit, flags)
    for lane in range(LANES):
        lanes.candidate[lane] = lanes.scale[lane]
        if lanes.largest[lane] != _ZERO:
            counted += 1
            scale = _grid_scale(lanes.values, lane, lanes.largest[lane]) if flags[lane] != _ZERO else _ZERO
            if scale != _ZERO:
                found += 1
                lanes.candidate[lane] = scale
    return found, counted


@part
def _keep_grids(lanes: Lanes) -> None:
    """Keep the grids that groups lie on; of single groups, which may do so by chance, only where that lowers the error.

    Where many do, the weight was trained or rounded to them: its noise is of the storage, and a scale that follows the noise
    would be nearer to the stored values, not to the weight's own.
    """
    found, counted = _propose_grids(lanes)
    if found * _MANY >= counted:
        for lane in range(LANES):
            lanes.scale[lane] = lanes.candidate[lane]
    elif found > 0:
        _compare(lanes)


# --- blocks -----------------------------------------------------------------------------------------


@part
def _round(lanes: Lanes) -> None:
    """Fill in the levels nearest to the weights; `found` and `power` become the squared error and the energy of each group."""
    values, levels, scale = lanes.values, lanes.levels, lanes.scale
    inverse, errors, energy = lanes.ratio, lanes.found, lanes.power
    for lane in range(LANES):
        inverse[lane] = _ONE / scale[lane] if scale[lane] != _ZERO else _ZERO
        errors[lane] = energy[lane] = _ZERO
    for word in range(LEVEL_WORDS):  # of levels 2w, 2w + 16, 2w + 1 and 2w + 17
        for lane in range(LANES):
            packed, squares, total = np.int32(0), errors[lane], energy[lane]
            for nibble in range(4):
                index = 2 * word + nibble // 2 + GROUP // 2 * (nibble % 2)
                value = values[index * LANES + lane]
                level = min(max(np.rint(value * inverse[lane]), _LOWEST), _HIGHEST)
                difference = value - level * scale[lane]
                squares += difference * difference
                total += value * value
                packed |= np.int32(level - _LOWEST) << np.int32(4 * nibble)
            errors[lane], energy[lane] = squares, total
            levels[word * LANES + lane] = np.uint16(packed)


@part
def _store(lanes: Lanes, first: int, packed: NDArray[np.uint16], sums: NDArray[np.float64]) -> None:
    """Write the blocks of groups `first` and following, and add to the squared error and the energy of all."""
    for lane in range(min(LANES, len(packed) // BLOCK_WORDS - first)):
        start = (first + lane) * BLOCK_WORDS
        packed[start] = _half_bits(lanes.scale[lane], lanes.scale_bits[lane])
        for word in range(LEVEL_WORDS):
            packed[start + 1 + word] = lanes.levels[word * LANES + lane]
        sums[0] += lanes.found[lane]
        sums[1] += lanes.power[lane]


@compiled
def quantize_groups(
    lanes: Lanes,
    short: NDArray[np.uint16],
    long: NDArray[np.uint32],
    kind: int,
    importance: Floats,
    columns: int,
    row_step: int,
    keep_grids: bool,
    packed: NDArray[np.uint16],
    sums: NDArray[np.float64],
) -> int:
    """Choose scale and levels of every group of 32, and pack them; see `quant.weighted_search`.

    Args:
        lanes: from `new_lanes`, not in use elsewhere.
        short: the values, groups one after the other, where they have 16 bits.
        long: the same where they have 32.
        kind: `BFLOAT16`, `FLOAT16` or `FLOAT32`: which of the two it is, and what they mean.
        importance: of each value of a row, rows one after the other; empty for the magnitude of the weights.
        columns: values in a row.
        row_step: from one row's importance to the next one's: `columns`, or 0 where all rows share one.
        keep_grids: store groups that lie on a grid of 16 levels as that grid.
        packed: the blocks, nine words for each group; filled in.
        sums: squared error and energy; added to.

    Returns:
        `OK`, `BAD_WEIGHT` (inf or nan) or `BAD_IMPORTANCE` (inf, nan or negative).
    """
    for first in range(0, len(packed) // BLOCK_WORDS, LANES):
        known = len(importance) > 0
        usable = not known or _load_importance(importance, columns, row_step, first, lanes)
        if not _load(short, long, kind, first, lanes):
            return BAD_WEIGHT
        if not usable:
            return BAD_IMPORTANCE
        _normalise(lanes.values, lanes.unit, lanes.largest, lanes.step)
        if not known:
            _take_magnitudes(lanes.unit, lanes.share)
        _search(lanes)
        if keep_grids:
            _keep_grids(lanes)
        _round(lanes)
        _store(lanes, first, packed, sums)
    return OK


@compiled
def find_grids(lanes: Lanes, short: NDArray[np.uint16], long: NDArray[np.uint32], kind: int, scales: Floats) -> int:
    """Fill in the scale of each group that lies on a grid, as float16 holds it, and 0 for the others.

    Args:
        lanes, short, long, kind: as for `quantize_groups`.
        scales: float32, one for each group.

    Returns:
        `OK` or `BAD_WEIGHT`.
    """
    for first in range(0, len(scales), LANES):
        if not _load(short, long, kind, first, lanes):
            return BAD_WEIGHT
        _normalise(lanes.values, lanes.unit, lanes.largest, lanes.step)
        for lane in range(LANES):
            lanes.scale[lane] = _ZERO
        _propose_grids(lanes)
        for lane in range(min(LANES, len(scales) - first)):
            scales[first + lane] = lanes.candidate[lane]
    return OK

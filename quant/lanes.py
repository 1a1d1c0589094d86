"""Room for what is computed of 64 groups at a time: the i-th values of all groups side by side, as vector units want them.

In: nothing. Out: arrays for `quant.block_kernel`, which fit together into a core's first cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quant.blocks import BLOCK_BYTES, GROUP

# Groups side by side: four times the widest vector, so that additions of one chain do not wait for each other.
LANES = 64
BLOCK_WORDS = BLOCK_BYTES // 2  # of 16 bits: one of scale, eight of levels
LEVEL_WORDS = BLOCK_WORDS - 1

Floats = NDArray[np.float32]
Words = NDArray[Any]


class Lanes(NamedTuple):
    """What is known of `LANES` groups at a time: arrays [32 * LANES] hold index i of all groups from i * LANES on.

    Attributes:
        values: the weights, float32 [32 * LANES].
        bits: the same memory, uint32.
        unit: divided by the signed maximum of their group, float32 [32 * LANES].
        unit_bits: the same memory, uint32.
        turned, spare: its two halves as uint16 [32 * LANES], for weights of 16 bits on their way.
        share: what each matters, relative to the most in its group, float32 [32 * LANES].
        share_bits: the same memory, uint32.
        scale: the best so far, float32 [LANES], as all that follow.
        scale_bits: the same memory, uint32 [LANES].
        largest: signed maximum of each group; zero where no scale can hold it.
        candidate: scale to be tried, as float16 holds it.
        error: of the best scale so far, in units of the maximum.
        ratio, step: of a candidate: levels for a value, values for a level, both in units of the maximum.
        found, overlap, power: sums over the values of a group.
        gain: the best quotient of such sums.
        levels: of the finished blocks, four to a word, uint16 [8 * LANES].
    """

    values: Floats
    bits: NDArray[np.uint32]
    unit: Floats
    unit_bits: NDArray[np.uint32]
    turned: NDArray[np.uint16]
    spare: NDArray[np.uint16]
    share: Floats
    share_bits: NDArray[np.uint32]
    scale: Floats
    scale_bits: NDArray[np.uint32]
    largest: Floats
    candidate: Floats
    error: Floats
    ratio: Floats
    step: Floats
    found: Floats
    overlap: Floats
    power: Floats
    gain: Floats
    levels: NDArray[np.uint16]


def new_lanes() -> Lanes:
    """Return room for one call at a time of what is compiled here."""
    values, unit, share = np.zeros((3, GROUP * LANES), np.float32)
    turned, spare = unit.view(np.uint16).reshape(2, -1)
    names = ("scale", "largest", "candidate", "error", "ratio", "step", "found", "overlap", "power", "gain")
    of_groups = dict(zip(names, np.zeros((len(names), LANES), np.float32), strict=True))
    return Lanes(
        values=values,
        bits=values.view(np.uint32),
        unit=unit,
        unit_bits=unit.view(np.uint32),
        turned=turned,
        spare=spare,
        share=share,
        share_bits=share.view(np.uint32),
        scale_bits=of_groups["scale"].view(np.uint32),
        levels=np.zeros(LEVEL_WORDS * LANES, np.uint16),
        **of_groups,
    )

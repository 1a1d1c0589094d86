"""The inputs that `check_device.py` runs an operator with, on the CPU and on a device. In: samples. Out: arrays of another size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SIZES = (1, 31, 32, 33, 64, 127, 128, 129, 256, 1000)


def inputs_at(samples: Sequence[Array], axes: Sequence[int | None], size: int) -> list[Array]:
    """Return inputs with another size along their axes: values of the samples, drawn with a fixed seed.

    Args:
        samples: one for each input.
        axes: for each input the axis that gets the size, or None.
        size: the new size.
    """
    random = np.random.default_rng(size)
    return [
        sample if axis is None else _drawn(sample, axis, size, random)
        for sample, axis in zip(samples, axes, strict=True)
    ]


def _drawn(sample: Array, axis: int, size: int, random: np.random.Generator) -> Array:
    shape = (*sample.shape[:axis], size, *sample.shape[axis + 1 :])
    drawn: Array = sample.ravel()[random.integers(0, sample.size, size=shape)]
    return drawn

"""Weights that need not be given away: a model's parameters replaced by random ones that a seed brings back anywhere.

In: an unpacked archive. Out: the same archive with random parameters, and a record from which `reproduce.py` makes them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import TensorFormatError
from generic_export.nnef.dat import HEADER_BYTES, read_dat, write_dat


@dataclass(frozen=True)
class SeededTensor:
    """A tensor of normal numbers: `numpy.random.default_rng(seed).standard_normal(shape, "float32") * scale + shift`.

    Attributes:
        label: its file is `<label>.dat`.
        shape: sizes.
        dtype: numpy name of the element type it is rounded to.
        seed: seed of this tensor alone.
        scale, shift: deviation and mean of the tensor that it replaces.
        header: the first 128 bytes of its file, in hexadecimal; the numbers follow.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    scale: float
    shift: float
    header: str

    def array(self) -> np.ndarray:
        """Return the numbers."""
        normal = np.random.default_rng(self.seed).standard_normal(self.shape, np.float32)
        return (normal * np.float32(self.scale) + np.float32(self.shift)).astype(self.dtype)

    def asdict(self) -> dict[str, Any]:
        """Return the record as plain data for JSON."""
        return asdict(self)


def reseed(folder: Path, labels: Collection[str], seed: int) -> list[SeededTensor]:
    """Replace float tensors of an unpacked archive by random ones of the same mean and deviation.

    Args:
        folder: the archive, unpacked; its files are rewritten.
        labels: the tensors to replace; those that the archive does not hold as plain floats stay.
        seed: tensor number `i` gets `seed + i`.
    """
    replaced: list[SeededTensor] = []
    for label in sorted(labels):
        path = folder / f"{label}.dat"
        if not path.exists():
            continue
        try:
            tensor = read_dat(path)
        except TensorFormatError:  # block-quantised
            continue
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        wide = tensor.double()
        record = SeededTensor(
            label,
            tuple(tensor.shape),
            str(tensor.numpy().dtype),
            seed + len(replaced),
            float(wide.std(correction=0)),
            float(wide.mean()),
            path.read_bytes()[:HEADER_BYTES].hex(),
        )
        write_dat(path, torch.from_numpy(record.array()))
        replaced.append(record)
    return replaced


__all__ = ["SeededTensor", "reseed"]

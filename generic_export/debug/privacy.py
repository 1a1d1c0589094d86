"""What may leave the machine: texts without its names and paths, and random weights that a seed brings back anywhere.

In: texts, or an unpacked archive. Out: the same texts redacted; the archive with random parameters, and a record from which
`reproduce.py` makes them.
"""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generic_export.errors import TensorFormatError
from generic_export.nnef.dat import HEADER_BYTES, read_dat, write_dat

# Absolute paths, of which the last part is kept: `/home/someone/models/a.py` is `a.py`.
_PATH = re.compile(r"(?<![\w/.])(?:/[\w.@+~ -]*[\w.@+~-])+/(?=[\w.@+~-])|[A-Za-z]:\\(?:[^\\\s\"']+\\)+")
_IDENTITY = re.compile(r'^\s*\("(?:user|host|os)",[^\n]*\),?\n', re.MULTILINE)
_DANGLING_COMMA = re.compile(r"\),(\s*\];)")
# Names that are no secret, and are words that a report needs.
_COMMON_NAMES = frozenset({"root", "user", "localhost", "ubuntu", "admin", "runner", "nobody", ""})


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


# What leaves this machine in a debug bundle says nothing of the machine: no user, host, home folder or environment.
# In: text that is about to be written to a bundle. Out: the same text without them.
def redacted(text: str) -> str:
    """Return text without folders, and without the names of the user and of the machine."""
    shortened = _PATH.sub("", text)
    for name in sorted(_own_names(), key=len, reverse=True):  # box.example before box
        shortened = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(redacted)", shortened)
    return shortened


def without_identity(graph_text: str) -> str:
    """Return a graph's text without the properties that say who exported it (`dump_identity_properties`)."""
    return _DANGLING_COMMA.sub(r")\1", _IDENTITY.sub("", graph_text))


def _own_names() -> set[str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = ""
    return {user, platform.node(), platform.node().split(".")[0]} - _COMMON_NAMES


__all__ = ["SeededTensor", "redacted", "reseed", "without_identity"]

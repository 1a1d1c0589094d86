"""What a calibration made of a model: blocks, what a scaling changed, and how far all of it is from the original."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from generic_export.weights.source import FileTensor
from quant.protocol import InputStatistics


@dataclass(frozen=True)
class TensorError:
    """How far one quantised tensor is from the original.

    Attributes:
        algorithm: which one chose its values.
        relative: squared error of its outputs over their square, on the calibration text; of large weights that of some rows.
        tokens: input rows seen.
        starved: of stacked experts, how many saw too few tokens, could borrow nothing, and got the data-free search.
    """

    algorithm: str
    relative: float
    tokens: int
    starved: int = 0


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration made; filled while it goes from layer to layer.

    Attributes:
        packed: parameter name -> its Q4_0 bytes, uint8 [..., K // 32 * 18], in a file of the work folder.
        changed: parameter name -> its new float32 values, where a scaling was folded in and nothing was quantised.
        errors: by parameter name, for everything in `packed`.
        left: parameter name -> why it was not quantised here although an algorithm was chosen.
        unfolded: what was not scaled, and why.
        statistics: mean squares of the inputs before any scaling, by parameter name.
    """

    packed: dict[str, FileTensor] = field(default_factory=dict)
    changed: dict[str, FileTensor] = field(default_factory=dict)
    errors: dict[str, TensorError] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unfolded: list[str] = field(default_factory=list)
    statistics: dict[str, InputStatistics] = field(default_factory=dict)


def write_tensor(path: Path, name: str, values: torch.Tensor) -> FileTensor:
    """Write a contiguous tensor's bytes to a file of its own; returns what reads them, under a parameter's name."""
    path.write_bytes(values.view(torch.uint8).numpy().data)
    return FileTensor(name, path, 0, tuple(values.shape), values.dtype)


__all__ = ["CalibrationResult", "TensorError", "write_tensor"]

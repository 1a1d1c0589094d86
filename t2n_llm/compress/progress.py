"""What a calibration tells on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class LayerProgress:
    """What is told after each decoder layer.

    Attributes:
        layer, layers: this one (from 1) of so many.
        error: mean squared change of the layer's outputs by quantising it, relative to their mean square.
        begun: how many layers an earlier run had done.
    """

    layer: int
    layers: int
    error: float
    begun: int = 0


@dataclass(frozen=True)
class SensitivityProgress:
    """What is told after each decoder layer whose tensors were measured: so many of so many."""

    done: int
    layers: int


Progress: TypeAlias = LayerProgress | SensitivityProgress
"""Whatever is told."""

__all__ = ["LayerProgress", "Progress", "SensitivityProgress"]

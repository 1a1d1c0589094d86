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


@dataclass(frozen=True)
class WritingProgress:
    """What is told while a model writes texts to learn from: so many of at most so many."""

    done: int
    texts: int


@dataclass(frozen=True)
class DistilProgress:
    """What is told after each judgement.

    Attributes:
        step, steps: done so far, of so many.
        before, now: mean KL on the texts that only judge, at the beginning and now.
        seconds_left: as it looks.
    """

    step: int
    steps: int
    before: float
    now: float
    seconds_left: float


Progress: TypeAlias = LayerProgress | SensitivityProgress | WritingProgress | DistilProgress
"""Whatever is told."""

__all__ = ["DistilProgress", "LayerProgress", "Progress", "SensitivityProgress", "WritingProgress"]

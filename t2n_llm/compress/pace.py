"""How the last learning goes on: how much of an effort is made, what comes next, how large a step is, when it is judged.

In: an effort. Out: shares of it, from 0 to 1, and what follows from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from t2n_llm.compress.effort import Effort

BATCH = 2  # texts of a step
_WARM = 0.05  # of all steps
_JUDGEMENTS = 8
_MEMORY = 0.95  # of what is averaged, a step later


@dataclass(frozen=True)
class Clock:
    """How much of an effort is made.

    Attributes:
        steps: of all; None where seconds count.
        seconds: of all.
        began: by the clock.
    """

    steps: int | None
    seconds: float
    began: float

    @staticmethod
    def of(effort: Effort, most: int, began: float) -> Clock:
        steps = -(-min(effort.passes, most) // BATCH) if effort.seconds is None else None
        return Clock(steps, effort.seconds or 0.0, began)

    def share(self, step: int) -> float:
        """Return how much is made after so many steps, from 0 to 1; 1 of no effort."""
        if self.steps is not None:
            return step / self.steps if self.steps else 1.0
        return (time.monotonic() - self.began) / self.seconds if self.seconds else 1.0

    def left(self, share: float) -> float:
        """Return the seconds that the rest takes as things go."""
        return (time.monotonic() - self.began) * (1 / share - 1)


def judgements(effort: Effort, seconds: float) -> int:
    """Return how often to judge: as often as takes a quarter of a time that is given, or 8 times.

    Args:
        effort: what is given.
        seconds: that one takes.
    """
    if effort.seconds is None:
        return _JUDGEMENTS
    return min(_JUDGEMENTS, max(1, int(effort.seconds / 4 / max(seconds, 1e-3))))


def texts_in_turn(texts: Sequence[int], seed: int) -> Iterator[int]:
    """Yield texts for ever: each once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for place in torch.randperm(len(texts), generator=generator).tolist():
            yield texts[place]


def paced(share: float) -> float:
    """Return the size of steps after a share of them: up from nothing, then down by a cosine."""
    return min(1.0, share / _WARM) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass
class Mean:
    """Learned tensors, averaged over the last steps: what single texts say of a scale is mostly noise (Polyak and Juditsky, 1992).

    Attributes:
        learned: what moves.
        averaged: of each of them.
        steps: that were averaged.
    """

    learned: list[torch.Tensor]
    averaged: list[torch.Tensor]
    steps: int = 0

    @staticmethod
    def of(groups: Iterable[Sequence[torch.Tensor]]) -> Mean:
        """Begin with the tensors as they are."""
        learned = [tensor for group in groups for tensor in group]
        return Mean(learned, [tensor.detach().clone() for tensor in learned])

    @torch.no_grad()
    def add(self) -> None:
        """Count the tensors as they are now; earlier ones count less and less, and at first the very first ones little."""
        self.steps += 1
        share = max(1 - _MEMORY, 1 / (1 + self.steps))
        for mean, tensor in zip(self.averaged, self.learned, strict=True):
            mean.lerp_(tensor, share)

    @contextmanager
    def given(self, values: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Give the tensors their averages, or other values, for a `with` block."""
        moved = [tensor.detach().clone() for tensor in self.learned]
        try:
            self._put(self.averaged if values is None else values)
            yield
        finally:
            self._put(moved)

    @torch.no_grad()
    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.learned, values, strict=True):
            tensor.copy_(value)


__all__ = ["BATCH", "Clock", "Mean", "judgements", "paced", "texts_in_turn"]

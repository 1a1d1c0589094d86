"""What changes the scores of a token that is sampled: how varied, and among which, as transformers' warpers do.

In: scores [vocab], float64. Out: new scores, minus infinity where a token is left out; the most likely one always stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from t2n_llm.runtime.sampling.rules import NEVER

_SMALLEST = 1e-100  # below it a division could overflow, and the largest scores alone have a probability anyway


class Warper(Protocol):
    """One change of scores before sampling."""

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """Return new scores [vocab], float64; those given stay as they are."""
        ...


@dataclass(frozen=True)
class Temperature:
    """Divides the scores: below 1 the likely tokens become likelier, above 1 all become alike."""

    temperature: float

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        if self.temperature < _SMALLEST:
            return np.where(scores < scores.max(), NEVER, scores)
        return scores / self.temperature


@dataclass(frozen=True)
class TopK:
    """Leaves the likeliest tokens, so many of them, and those as likely as the last of these (Fan et al. 2018, section 5.4)."""

    count: int

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        count = min(self.count, len(scores))
        return np.where(scores < np.partition(scores, -count)[-count], NEVER, scores)


@dataclass(frozen=True)
class TopP:
    """Leaves the fewest tokens that together have this probability, likely ones first (Holtzman et al. 2020, section 3.1)."""

    probability: float

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        likely = probabilities(scores)
        # All that is less likely than this is less likely together than what is left out: it need not be sorted.
        few = np.flatnonzero(likely >= (1 - self.probability) / len(scores))
        rising = few[np.argsort(scores[few], kind="stable")]
        below = max(0.0, 1 - likely[few].sum())
        left_out = rising[:-1][below + np.cumsum(likely[rising[:-1]]) <= 1 - self.probability]
        warped = np.where(likely < (1 - self.probability) / len(scores), NEVER, scores)
        warped[left_out] = NEVER
        return warped


@dataclass(frozen=True)
class MinP:
    """Leaves the tokens that are at least so likely, measured by the likeliest (Nguyen et al. 2024, section 3)."""

    probability: float

    def warped(self, scores: np.ndarray) -> np.ndarray:
        """See `Warper`."""
        likely = probabilities(scores)
        return np.where(likely < self.probability * likely.max(), NEVER, scores)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of scores."""
    weights = np.exp(scores - scores.max())
    normalised: np.ndarray = weights / weights.sum()
    return normalised


__all__ = ["MinP", "Temperature", "TopK", "TopP", "Warper", "probabilities"]

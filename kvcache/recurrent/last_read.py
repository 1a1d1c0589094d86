"""The recurrent state that a running layer has just read from its cache.

In: noted by caches. Out: taken by recurrences that are not handed their state. A hand-over within one call, not a store: it is
empty in every pickle.
"""

from __future__ import annotations

import torch


class LastRead:
    """Where caches and the recurrences of one model meet; several caches may share it."""

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None
        self._heads_taken = 0

    def note(self, state: torch.Tensor | None) -> None:
        """Say what a layer reads; None when its cache holds nothing."""
        self._state, self._heads_taken = state, 0

    def take(self, rank: int) -> torch.Tensor | None:
        """Return the state, of a rank.

        A layer that runs its heads one after another keeps them in one tensor [B, heads, ...]; each call takes the next.
        """
        if self._state is None or self._state.ndim == rank:
            return self._state
        self._heads_taken += 1
        return self._state[:, self._heads_taken - 1]

    def __reduce__(self) -> tuple[type[LastRead], tuple[()]]:
        return LastRead, ()

"""How many tokens to guess at once: so many, or more while guesses are right.

In: what came of the last draft. Out: tokens of the next one.
"""

from __future__ import annotations

from typing import Protocol

LEAST = 2
"""Tokens that are guessed where guesses are wrong: tract's f16 kernels take three tokens in little more time than one."""

_STEP = 3  # tokens that a tile of these kernels holds


class DraftLength(Protocol):
    """How many tokens to guess."""

    @property
    def tokens(self) -> int:
        """Of the next draft."""
        ...

    def after(self, drafted: int, accepted: int) -> DraftLength:
        """Return what holds after a draft.

        Args:
            drafted: its tokens.
            accepted: those that stayed.
        """
        ...


class FixedDraftLength:
    """Always as many."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def after(self, drafted: int, accepted: int) -> DraftLength:
        """See `DraftLength`."""
        del drafted, accepted
        return self


class AdaptiveDraftLength:
    """More after a draft that was right as a whole, fewer after another: 2, 5, 8, which with one token before them fill tiles."""

    def __init__(self, most: int, tokens: int = LEAST) -> None:
        self.most, self.tokens = most, min(most, tokens)

    def after(self, drafted: int, accepted: int) -> DraftLength:
        """See `DraftLength`; a draft that was shorter than asked for tells nothing."""
        if drafted < self.tokens:
            return self
        changed = self.tokens + (_STEP if accepted == drafted else -_STEP)
        return AdaptiveDraftLength(self.most, max(LEAST, changed))


__all__ = ["LEAST", "AdaptiveDraftLength", "DraftLength", "FixedDraftLength"]

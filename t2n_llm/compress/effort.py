"""How long `tuned` learns at the end: a number of passes, or a time that a user writes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from generic_export.errors import OptionError

DEFAULT_PASSES = 600
MOST_TEXTS = 96
"""So many texts does `tuned` read, where there are so many."""

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)?\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Effort:
    """How long is learned.

    Attributes:
        passes: over one text each; no text is read more than a few times.
        seconds: of the clock, instead of a number of passes; None for these. What comes of it depends on the machine then.
        seed: of the order of the texts.
    """

    passes: int = DEFAULT_PASSES
    seconds: float | None = None
    seed: int = 0

    @property
    def is_none(self) -> bool:
        """Whether nothing is to be learned."""
        return self.seconds == 0 if self.seconds is not None else self.passes == 0

    def less(self, seconds: float) -> Effort:
        """Return what is left of it after so many seconds; a number of passes stays."""
        return self if self.seconds is None else replace(self, seconds=max(0.0, self.seconds - seconds))


def parse_duration(text: str) -> float:
    """Return seconds: a number with a unit (`30min`, `2h`, `90 s`), or 0.

    Raises:
        OptionError: it is no such time.
    """
    found = _DURATION.fullmatch(text)
    unit = (found[2] or "").lower() if found else ""
    if found is None or (unit not in _UNITS and (unit or float(found[1]))):
        raise OptionError(f"{text[:40]!r} is no time.", "Write a number and a unit, such as 30min, 2h or 90s; or 0.")
    return float(found[1]) * _UNITS.get(unit, 0.0)


__all__ = ["DEFAULT_PASSES", "MOST_TEXTS", "Effort", "parse_duration"]

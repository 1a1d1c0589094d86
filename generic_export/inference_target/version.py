"""`SemanticVersion`: release numbers that compare as numbers.

In: text such as `0.23.9` or `0.23.10-rc.1`. Out: an ordered value, and the same text again.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from generic_export.errors import OptionError

_TEXT = re.compile(
    r"v?(0|[1-9]\d*)\.(0|[1-9]\d*)(?:\.(0|[1-9]\d*))?(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:\+[0-9A-Za-z.-]+)?"
)


@functools.total_ordering
@dataclass(frozen=True)
class SemanticVersion:
    """A version number, ordered as Semantic Versioning 2.0.0 (section 11) defines. Build metadata (`+...`) is dropped.

    Attributes:
        major: first number.
        minor: second number.
        patch: third number.
        prerelease: text after the hyphen, such as `rc.1`, or "".
    """

    major: int
    minor: int
    patch: int = 0
    prerelease: str = ""

    @staticmethod
    def parse(text: str | SemanticVersion) -> SemanticVersion:
        """Parse a version. A `SemanticVersion` is returned unchanged.

        Args:
            text: such as "0.23.9".

        Raises:
            OptionError: the text is not a version.
        """
        if isinstance(text, SemanticVersion):
            return text
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise OptionError(f"{text!r} is not a version of the form 0.23.9.")
        return SemanticVersion(int(match[1]), int(match[2]), int(match[3] or 0), match[4] or "")

    @staticmethod
    def from_str(text: str) -> SemanticVersion:
        """Parse a version; an alias of `parse`.

        Args:
            text: such as "0.23.9".
        """
        return SemanticVersion.parse(text)

    def __str__(self) -> str:
        numbers = f"{self.major}.{self.minor}.{self.patch}"
        return f"{numbers}-{self.prerelease}" if self.prerelease else numbers

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, SemanticVersion):
            return NotImplemented
        return self._precedence() < other._precedence()

    def _precedence(self) -> tuple[int, int, int, bool, list[tuple[bool, int, str]]]:
        parts = self.prerelease.split(".") if self.prerelease else []
        # Numbers come before words, and compare as numbers.
        order = [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
        return self.major, self.minor, self.patch, not self.prerelease, order


__all__ = ["SemanticVersion"]

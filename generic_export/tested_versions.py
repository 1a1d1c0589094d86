"""The releases of other libraries that everything was tried with, and which of the installed ones are beyond them.

In: installed packages. Out: sentences. A newer release is not refused: most of them work, and who uses one is told that nobody
has tried it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from generic_export.errors import OptionError
from generic_export.inference_target.version import SemanticVersion


@dataclass(frozen=True)
class VersionRange:
    """A package, and the minor releases that were tried: `constraints-lowest.txt` and `constraints.txt` have one of each."""

    package: str
    lowest: str
    newest: str

    def doubt(self, installed: str) -> str | None:
        """Say that an installed version was not tried; None for one that was.

        Args:
            installed: such as `2.16.0+cpu` or `2.16.0.dev20261101`.
        """
        numbers = ".".join(installed.split(".")[:2])
        try:
            minor, newest = SemanticVersion.parse(numbers), SemanticVersion.parse(self.newest)
        except OptionError:  # a build that somebody named in a way of his own
            return None
        if minor <= newest:
            return None
        return f"{self.package} {installed} was not tried with this release (tried: {self.lowest} to {self.newest})."


TORCH = VersionRange("torch", "2.10", "2.15")
TRANSFORMERS = VersionRange("transformers", "5.15", "5.24")
TRACT = VersionRange("tract", "0.23", "0.23")


def doubts(*tested: VersionRange) -> Iterator[str]:
    """Yield a sentence for each package whose installed release was not tried."""
    for each in tested:
        try:
            doubt = each.doubt(version(each.package))
        except PackageNotFoundError:
            continue
        if doubt is not None:
            yield doubt


__all__ = ["TORCH", "TRACT", "TRANSFORMERS", "VersionRange", "doubts"]

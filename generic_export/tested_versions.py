"""The tested releases of other libraries, and warnings for installed releases that are newer.

In: installed packages. Out: a warning for each untested one. Newer releases are not refused, because most of them work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from generic_export.errors import OptionError
from generic_export.inference_target.version import SemanticVersion


@dataclass(frozen=True)
class VersionRange:
    """The tested minor releases of a package.

    Attributes:
        package: name on PyPI.
        lowest: minor release in `constraints-lowest.txt`, such as `2.10`.
        newest: minor release in `constraints.txt`.
    """

    package: str
    lowest: str
    newest: str

    def doubt(self, installed: str) -> str | None:
        """Return a warning if an installed version is newer than the tested ones, else None.

        Args:
            installed: such as `2.16.0+cpu` or `2.16.0.dev20261101`.
        """
        numbers = ".".join(installed.split(".")[:2])
        try:
            minor, newest = SemanticVersion.parse(numbers), SemanticVersion.parse(self.newest)
        except OptionError:  # a custom build without a version number
            return None
        if minor <= newest:
            return None
        return f"{self.package} {installed} was not tested with this release (tested: {self.lowest} to {self.newest})."


TORCH = VersionRange("torch", "2.10", "2.15")
TRANSFORMERS = VersionRange("transformers", "5.15", "5.24")
TRACT = VersionRange("tract", "0.23", "0.23")


def doubts(*tested: VersionRange) -> Iterator[str]:
    """Yield a warning for each package whose installed release is newer than the tested ones."""
    for each in tested:
        try:
            doubt = each.doubt(version(each.package))
        except PackageNotFoundError:
            continue
        if doubt is not None:
            yield doubt


_told: set[str] = set()


def new_doubts(*tested: VersionRange) -> Iterator[str]:
    """Yield the warnings that this process has not given yet, each once."""
    for doubt in doubts(*tested):
        if doubt not in _told:
            _told.add(doubt)
            yield doubt


__all__ = ["TORCH", "TRACT", "TRANSFORMERS", "VersionRange", "doubts", "new_doubts"]

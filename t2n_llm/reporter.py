"""What long work tells while it goes on; the command line draws it, a library caller may ignore it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from generic_export.write.archive import WriteProgress

logger = logging.getLogger(__name__)


Steps: TypeAlias = Callable[[int, int], None]
"""Receives how many steps of a stage are done, and how many there are."""


def no_steps(done: int, total: int) -> None:
    """Ignore them."""


class Reporter(Protocol):
    """Told what happens."""

    def stage(self, title: str) -> None:
        """A new stage begins."""

    def steps(self, done: int, total: int) -> None:
        """So many steps of the stage are done."""

    def progress(self, progress: WriteProgress) -> None:
        """So much of the archive is written; told several times a second, the last time when everything is."""

    def warn(self, message: str) -> None:
        """Something the user should know, though the work goes on."""


class LogReporter:
    """Reports through `logging`: the default of the Python interface."""

    def stage(self, title: str) -> None:
        """Log the stage."""
        logger.info("%s", title)

    def steps(self, done: int, total: int) -> None:
        """Log at debug level."""
        logger.debug("%d of %d", done, total)

    def progress(self, progress: WriteProgress) -> None:
        """Log at debug level."""
        logger.debug("%s (%d of %d bytes)", progress.label, progress.done_bytes, progress.total_bytes)

    def warn(self, message: str) -> None:
        """Log a warning."""
        logger.warning("%s", message)

"""The level of loggers, for a block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_at(level: int | str | None, *names: str) -> Iterator[None]:
    """Have some loggers tell only what is of a level (`"debug"`, `logging.ERROR`) or above; None leaves them alone."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    try:
        if level is not None:
            for logger in loggers:
                logger.setLevel(level.upper() if isinstance(level, str) else level)
        yield
    finally:
        for logger, own in zip(loggers, before, strict=True):
            logger.setLevel(own)

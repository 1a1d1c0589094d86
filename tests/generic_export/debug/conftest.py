"""What the tests of a diagnosis share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C: processes that a shell starts in the background are born with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

"""An interrupt is not lost wherever it comes; nothing of it is left behind."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest

from generic_export.interrupts import kept_interrupts

pytestmark = pytest.mark.usefixtures("heard_interrupts")


class Thing:
    """Something that can be referred to weakly."""


def interrupt_in_a_finaliser() -> None:
    """Send the signal where Python would print the exception and go on."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert reference() is None


def test_an_interrupt_is_raised_where_it_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), kept_interrupts() as raise_interrupt:
        raise_interrupt()
        interrupt_in_a_finaliser()
        raise_interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_one_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_someone_else_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with kept_interrupts() as raise_interrupt:
            signal.raise_signal(signal.SIGINT)
            raise_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_it_works_in_another_thread() -> None:
    passed: list[bool] = []

    def work() -> None:
        with kept_interrupts() as raise_interrupt:
            raise_interrupt()
            passed.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert passed

"""Ctrl-C wherever it lands: also where Python drops the exception of a signal's handler."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from generic_export.interrupts import Interrupted, asking, interruptible, raise_if_interrupted
from generic_export.write.archive import WriteProgress
from t2n_llm.cli.console import OutputMode, Sink
from t2n_llm.export.pipeline import export_llm
from tests.t2n_llm.command_line import unchanged

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Thing:
    """Something that a weak reference can point to."""


def press_where_nobody_hears(number: int = signal.SIGINT) -> None:
    """Let a signal arrive in the callback of a weak reference."""

    def pressed(_: object) -> None:
        os.kill(os.getpid(), number)
        for _turn in range(1000):  # the handler runs here
            pass

    thing = Thing()
    reference = weakref.ref(thing, pressed)
    del thing
    gc.collect()
    assert reference() is None


class PressedAt(Sink):
    """Presses once, at a stage or when some tensors are written."""

    def __init__(self, moment: str, number: int) -> None:
        super().__init__(OutputMode.QUIET)
        self.moment, self.number, self.pressed = moment, number, 0

    def _press(self) -> None:
        if not self.pressed:
            self.pressed += 1
            press_where_nobody_hears(self.number)

    def stage(self, title: str) -> None:
        super().stage(title)
        if title.startswith(self.moment):
            self._press()

    def progress(self, progress: WriteProgress) -> None:
        super().progress(progress)
        if self.moment == "weights" and progress.done_entries > 2:
            self._press()


MOMENTS = ("Reading", "Capturing", "Writing", "weights", "Running PyTorch", "Checking", "Recording")


@pytest.mark.parametrize(
    ("moment", "archive", "number"),
    [
        *((moment, "tar", signal.SIGINT) for moment in MOMENTS),
        ("weights", "tgz", signal.SIGINT),
        ("weights", "tar", signal.SIGTERM),
    ],
)
def test_a_swallowed_interrupt_ends_the_export(
    moment: str, archive: str, number: int, tiny_llama: Path, parent: Path
) -> None:
    sink = PressedAt(moment, number)
    with unchanged(parent), interruptible(), pytest.raises(Interrupted):
        export_llm(
            *(str(tiny_llama), parent / "x"), archive=archive, require_tokenizer=False, decode_steps=2, reporter=sink
        )
    assert sink.pressed == 1


def test_the_signal_is_remembered_and_forgotten() -> None:
    raise_if_interrupted()
    with interruptible():
        raise_if_interrupted()
        press_where_nobody_hears()
        with pytest.raises(Interrupted):
            raise_if_interrupted()
        with pytest.raises(Interrupted):
            list(asking([1]))
    raise_if_interrupted()
    assert list(asking([1, 2])) == [1, 2]


def test_an_interrupt_that_is_heard_is_raised_where_it_lands() -> None:
    with interruptible(), pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


TWICE = """
import os, signal, time
from generic_export.interrupts import Interrupted, interruptible
with interruptible():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except Interrupted:
        pass
    os.kill(os.getpid(), signal.SIGINT)  # the same press, passed on twice
    time.sleep(0.7)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
    print("and still")
"""


def test_a_second_press_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("still here\n", -signal.SIGINT), done.stderr
